#pragma once
// Start here. Ferry carries tokens to the experts of a Mixture-of-Experts layer and brings the
// weighted sums home.
//
//   ferry::threads::run({.nodes = 2, .ranks_per_node = 4}, [](ferry::Transport& transport) {
//     ferry::Exchange exchange(transport, placement,
//                              {.hidden = 1024, .dtype = ferry::DType::bf16});
//     ferry::Plan plan = exchange.plan(routing);
//     ferry::ExpertRows rows = exchange.dispatch(plan, x);
//     ferry::OutputRows y = exchange.output(plan);   // write the experts' outputs here
//     exchange.combine(plan, y.matrix(), out);       // out[t] = sum_j w[t,j] * y(t,j)
//   });
//
// The words are explained in docs/concepts.md; examples/hello_dispatch.cpp runs.

#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/launch.hpp"
#include "ferry/log.hpp"
#include "ferry/matrix.hpp"
#include "ferry/options.hpp"
#include "ferry/pending.hpp"
#include "ferry/placement.hpp"
#include "ferry/progress_thread.hpp"
#include "ferry/routing.hpp"
#include "ferry/threads.hpp"
#include "ferry/topology.hpp"
#include "ferry/transport.hpp"
#include "ferry/wire_policy.hpp"
