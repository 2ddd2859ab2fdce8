// Groups and their end: see group.hpp.

#include "group.hpp"

#include <pybind11/stl.h>

#include <algorithm>

#include <fmt/format.h>

#include "arrays.hpp"
#include "ferry/error.hpp"
#include "ferry/threads.hpp"
#include "pending.hpp"

namespace ferry::python {

namespace {

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

Group::Group(std::unique_ptr<Transport> transport, const GroupOptions& options)
    : rank_(transport->rank()),
      topology_(transport->topology()),
      name_(transport->name()),
      options_(options),
      transport_(std::move(transport)) {
  ferry::set_limits(*transport_, options.limits);
  if (options.checks_signals) transport_->set_wait_check(&check_signals);
  if (options.progress_thread) progress_.emplace(*transport_);
}

Group::~Group() {
  // Nothing of Python is left that could call: resources hold their group.
  if (!transport_) return;
  let_go_of_all();  // what another thread dropped still works on the transport
  buried_.clear();
  without_gil([this] {
    progress_.reset();
    transport_.reset();
  });
}

Group::Use::Use(Group& group) : group_(group) {
  bool first = false;
  {
    const std::lock_guard lock(group.mutex_);
    if (group.closing_) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("group: rank {} has left it; fix: make the calls before its end",
                              group.rank_));
    }
    first = group.num_inside_++ == 0;
    group.caller_ = std::this_thread::get_id();
  }
  if (first) group.drain();
}

Group::Use::~Use() {
  {
    const std::lock_guard lock(group_.mutex_);
    --group_.num_inside_;
  }
  group_.left_.notify_all();
}

void Group::add(Resource* resource) {
  const std::lock_guard lock(mutex_);
  resources_.push_back(resource);
}

void Group::bury(std::unique_ptr<Resource> resource) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(resources_, resource.get());
    const bool gone = transport_ == nullptr;  // close() has let it go
    if (!gone && (closing_ || num_inside_ > 0 || caller_ != std::this_thread::get_id())) {
      buried_.push_back(std::move(resource));
      return;
    }
    if (gone) return;
    ++num_inside_;
  }
  resource->let_go();
  const std::lock_guard lock(mutex_);
  --num_inside_;
}

void Group::drain() {
  std::vector<std::unique_ptr<Resource>> buried;
  {
    const std::lock_guard lock(mutex_);
    buried.swap(buried_);
  }
  for (const auto& resource : buried) resource->let_go();
}

void Group::let_go_of_all() {
  for (const bool first : {true, false}) {
    std::vector<Resource*> known;
    {
      const std::lock_guard lock(mutex_);
      known = resources_;
    }
    for (Resource* const resource : known) {
      if (resource->goes_first() == first) resource->let_go();
    }
    std::vector<std::unique_ptr<Resource>> buried;
    {
      const std::lock_guard lock(mutex_);
      buried.swap(buried_);
    }
    for (auto& resource : buried) {
      if (resource->goes_first() == first) {
        resource->let_go();
      } else {
        const std::lock_guard lock(mutex_);
        buried_.push_back(std::move(resource));
      }
    }
  }
}

bool Group::closed() const {
  const std::lock_guard lock(mutex_);
  return closing_;
}

void Group::abort(const std::string& text) {
  // Held throughout: the transport must not go meanwhile. No call of Ferry waits for this lock.
  const py::gil_scoped_release release;
  const std::lock_guard lock(mutex_);
  if (transport_) transport_->abort(text);
}

void Group::close(const std::optional<std::string>& failure) {
  std::vector<std::weak_ptr<Group>> subgroups;
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    if (num_inside_ > 0 && caller_ == std::this_thread::get_id()) {
      throw Error(ErrorCode::invalid_argument,
                  "group: its end was called inside another call on it; fix: let that return");
    }
    closing_ = true;
    subgroups.swap(subgroups_);
  }
  for (const auto& weak : subgroups) {
    if (const auto subgroup = weak.lock()) subgroup->close(failure);
  }
  without_gil([&] {
    std::unique_lock lock(mutex_);
    if (failure) transport_->abort(*failure);
    if (num_inside_ > 0) {
      transport_->abort(
          fmt::format("rank {} left the group while another thread was in a call on "
                      "it",
                      rank_));
    }
    left_.wait(lock, [this] { return num_inside_ == 0; });
  });
  std::unique_ptr<Transport> transport;
  while (!transport) {
    let_go_of_all();
    const std::lock_guard lock(mutex_);
    if (buried_.empty()) transport = std::move(transport_);  // else one was dropped just now
  }
  without_gil([&] {
    progress_.reset();
    transport.reset();
  });
}

std::shared_ptr<Group> Group::subgroup(const std::vector<int>& ranks) {
  const Use use(*this);
  auto made = without_gil([&] {
    return std::make_shared<Group>(use.transport().subgroup(ranks, options_.limits.deadline_s),
                                   options_);
  });
  const std::lock_guard lock(mutex_);
  std::erase_if(subgroups_, [](const auto& one) { return one.expired(); });
  subgroups_.push_back(made);
  return made;
}

void Group::set_limits(const TransportLimits& limits) {
  const Use use(*this);
  without_gil([&] { ferry::set_limits(use.transport(), limits); });
  options_.limits = limits;
}

namespace {

using Gathered = std::vector<std::vector<std::byte>>;

py::object list_of(Gathered&& gathered) {
  py::list all;
  for (const auto& bytes : gathered) {
    all.append(py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  return all;
}

std::unique_ptr<PyPending> start_all_gather(const std::shared_ptr<Group>& group, py::handle array) {
  const Group::Use use(*group);
  const Argument argument{"all_gather", "the array", group->rank()};
  View view = view_of(array, argument);
  const std::span<const std::byte> mine = bytes_of(view, argument);
  auto started = without_gil([&] { return ferry::start_all_gather(use.transport(), mine); });
  return make_pending(group, std::move(started), &list_of, {view.keep});
}

py::dict counters_of(Group& group) {
  const Group::Use use(group);
  const TrafficCounters counters = without_gil([&] { return use.transport().counters(); });
  py::dict made;
  made["payload_bytes"] = counters.payload_bytes;
  made["metadata_bytes"] = counters.metadata_bytes;
  made["control_bytes"] = counters.control_bytes;
  made["messages"] = counters.messages;
  return made;
}

template <typename Ask>
auto asked(Group& group, const Ask& ask) {
  const Group::Use use(group);
  return without_gil([&] { return ask(use.transport()); });
}

void bind_world(py::module_& module) {
  py::class_<threads::World>(module, "World", "Ranks that are threads of this process.")
      .def(py::init([](const Topology& topology, double link_bits_per_s) {
             threads::Options options;
             options.topology = topology;
             options.link_bits_per_s = link_bits_per_s;
             return std::make_unique<threads::World>(options);
           }),
           py::arg("topology"), py::arg("link_bits_per_s"))
      .def(
          "join",
          [](threads::World& world, int rank, double deadline_s, bool progress_thread) {
            GroupOptions options{.limits = {.deadline_s = deadline_s},
                                 .progress_thread = progress_thread};
            return without_gil([&] { return std::make_shared<Group>(world.join(rank), options); });
          },
          py::arg("rank"), py::arg("deadline_s"), py::arg("progress_thread"))
      .def("abort", &threads::World::abort, py::arg("text"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_group(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "GroupCore", "What ferry.Group wraps.")
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("topology", &Group::topology)
      .def_property_readonly("transport", &Group::name)
      .def_property_readonly("closed", &Group::closed)
      .def_property_readonly("deadline_s",
                             [](const Group& group) { return group.limits().deadline_s; })
      .def("start_all_gather", &start_all_gather, py::arg("array"))
      .def("subgroup", &Group::subgroup, py::arg("ranks"))
      .def("close", &Group::close, py::arg("failure"))
      .def("abort", &Group::abort, py::arg("text"))
      .def(
          "set_limits",
          [](Group& group, const py::dict& changes) {
            TransportLimits limits = group.limits();
            for (const auto& [key, value] : changes) {
              const auto name = key.cast<std::string>();
              if (name == "deadline_s") limits.deadline_s = value.cast<double>();
              if (name == "pool_limit_bytes") limits.pool_limit_bytes = value.cast<std::uint64_t>();
              if (name == "metadata_limit_bytes") {
                limits.metadata_limit_bytes = value.cast<std::uint64_t>();
              }
              if (name == "num_tokens_limit") limits.num_tokens_limit = value.cast<std::uint64_t>();
              if (name == "gather_staging_bytes") {
                limits.gather_staging_bytes = value.cast<std::uint64_t>();
              }
            }
            group.set_limits(limits);
          },
          py::arg("changes"))
      .def("counters", &counters_of)
      .def("pool_bytes",
           [](Group& group) {
             return asked(group, [](const Transport& one) { return ferry::pool_bytes(one); });
           })
      .def("staging_bytes",
           [](Group& group) {
             return asked(group, [](const Transport& one) { return ferry::staging_bytes(one); });
           })
      .def(
          "poison_free_slots",
          [](Group& group, unsigned char value) {
            const Group::Use use(group);
            without_gil([&] { ferry::poison_free_slots(use.transport(), value); });
          },
          py::arg("value"));
  bind_world(module);
}

}  // namespace ferry::python
