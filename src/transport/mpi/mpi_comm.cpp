// Calls, lengths and communicators; see mpi_comm.hpp.

#include "transport/mpi/mpi_comm.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <thread>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "base/keep_forever.hpp"
#include "ferry/error.hpp"

namespace ferry::detail {

namespace {

constexpr std::uint64_t kBlockBytes = 1ULL << 30;
constexpr std::uint64_t kMostPairs = 64;  // one bit each in the agreement

int delete_pairs(MPI_Comm, int, void* pairs, void*) {
  delete static_cast<std::shared_ptr<CommPairs>*>(pairs);
  return MPI_SUCCESS;
}

int pairs_key() {
  static const int key = [] {
    int made = MPI_KEYVAL_INVALID;
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &delete_pairs, &made, nullptr),
              "MPI_Comm_create_keyval");
    return made;
  }();
  return key;
}

// What a program promised about its own messages does not hold for Ferry's.
void drop_promises(MPI_Comm comm) {
  MPI_Info info = MPI_INFO_NULL;
  check_mpi(MPI_Info_create(&info), "MPI_Info_create");
  for (const char* const promise : {"mpi_assert_allow_overtaking", "mpi_assert_no_any_source",
                                    "mpi_assert_no_any_tag", "mpi_assert_exact_length"}) {
    MPI_Info_set(info, promise, "false");
  }
  const int set = MPI_Comm_set_info(comm, info);
  MPI_Info_free(&info);
  check_mpi(set, "MPI_Comm_set_info");
}

MPI_Comm duplicate(MPI_Comm comm, double deadline_s) {
  const auto call = std::make_shared<Collective>();
  check_mpi(MPI_Comm_idup(comm, &call->made, &call->request), "MPI_Comm_idup");
  wait_for(call, deadline_s, "all ranks to duplicate the communicator");
  check_mpi(MPI_Comm_set_errhandler(call->made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  drop_promises(call->made);
  return call->made;
}

}  // namespace

void check_mpi(int code, std::string_view call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw Error(ErrorCode::peer_failed,
              fmt::format("{} failed: {}; fix: see the launcher's messages for a rank or a link "
                          "that ended",
                          call, std::string_view(text.data(), static_cast<std::size_t>(length))));
}

void wait_for(const std::shared_ptr<Collective>& call, double deadline_s, std::string_view what) {
  const double began = base::now_s();
  while (true) {
    int done = 0;
    const int code = MPI_Test(&call->request, &done, MPI_STATUS_IGNORE);
    if (code == MPI_SUCCESS && done != 0) return;
    if (code != MPI_SUCCESS || base::now_s() - began > deadline_s) base::keep_forever(call);
    check_mpi(code, "MPI_Test");
    if (base::now_s() - began > deadline_s) {
      throw Error(ErrorCode::timeout,
                  fmt::format("attach: waited {:g} s for {}; fix: call attach on every rank of the "
                              "communicator, or raise deadline_s",
                              deadline_s, what));
    }
    std::this_thread::yield();
  }
}

MpiBytes::MpiBytes(std::uint64_t bytes) {
  if (bytes <= static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    count_ = static_cast<int>(bytes);
    return;
  }
  MPI_Datatype block = MPI_DATATYPE_NULL;
  check_mpi(MPI_Type_contiguous(static_cast<int>(kBlockBytes), MPI_BYTE, &block),
            "MPI_Type_contiguous");
  const std::uint64_t blocks = bytes / kBlockBytes;
  const std::array<int, 2> lengths{static_cast<int>(blocks), static_cast<int>(bytes % kBlockBytes)};
  const std::array<MPI_Aint, 2> offsets{0, static_cast<MPI_Aint>(blocks * kBlockBytes)};
  const std::array<MPI_Datatype, 2> types{block, MPI_BYTE};
  const int made = MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type_);
  MPI_Type_free(&block);
  check_mpi(made, "MPI_Type_create_struct");
  check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  count_ = 1;
}

MpiBytes::~MpiBytes() {
  if (type_ != MPI_BYTE) MPI_Type_free(&type_);  // MPI keeps it while a request uses it
}

std::uint64_t message_bytes(const MPI_Status& status) {
  MPI_Count bytes = 0;
  check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
  return bytes < 0 ? 0 : static_cast<std::uint64_t>(bytes);
}

std::shared_ptr<CommPairs> CommPairs::of(MPI_Comm comm) {
  void* found = nullptr;
  int exists = 0;
  check_mpi(MPI_Comm_get_attr(comm, pairs_key(), &found, &exists), "MPI_Comm_get_attr");
  if (exists == 0) {
    found = new std::shared_ptr<CommPairs>(std::make_shared<CommPairs>(comm));  // delete_pairs
    check_mpi(MPI_Comm_set_attr(comm, pairs_key(), found), "MPI_Comm_set_attr");
  }
  return *static_cast<std::shared_ptr<CommPairs>*>(found);
}

// The first pair that is free on every rank; a rank may not have left the last use of one yet.
std::size_t CommPairs::agree_on_free(double deadline_s) {
  std::uint64_t free_here = 0;
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    if (pairs_[i].free) free_here |= 1ULL << i;
  }
  const auto call = std::make_shared<Collective>();
  call->out.resize(sizeof free_here);
  call->in.resize(sizeof free_here);
  std::memcpy(call->out.data(), &free_here, sizeof free_here);
  check_mpi(MPI_Iallreduce(call->out.data(), call->in.data(), 1, MPI_UINT64_T, MPI_BAND, comm_,
                           &call->request),
            "MPI_Iallreduce");
  wait_for(call, deadline_s, "all ranks to come to attach");
  std::uint64_t free_everywhere = 0;
  std::memcpy(&free_everywhere, call->in.data(), sizeof free_everywhere);
  std::size_t found = 0;
  while (found < pairs_.size() && (free_everywhere >> found & 1) == 0) ++found;
  return found;
}

CommPair CommPairs::take(double deadline_s) {
  const std::size_t at = agree_on_free(deadline_s);
  if (at == kMostPairs) {
    throw Error(ErrorCode::limit_exceeded,
                fmt::format("attach: {} transports of one communicator are alive; allowed: that "
                            "many; fix: use several exchanges on one transport",
                            kMostPairs));
  }
  if (at == pairs_.size()) {
    Entry entry;
    entry.pair.payload = duplicate(comm_, deadline_s);
    entry.pair.others = duplicate(comm_, deadline_s);
    MPI_Comm_rank(comm_, &entry.pair.rank);
    MPI_Comm_size(comm_, &entry.pair.size);
    pairs_.push_back(entry);
  }
  Entry& entry = pairs_[at];
  entry.free = false;
  // MPI promises tags up to 32767; so many uses later nothing of this one is left.
  entry.pair.first_tag = entry.uses++ % (32767 / kTags) * kTags;
  return entry.pair;
}

void CommPairs::give_back(const CommPair& pair) {
  const auto found = std::ranges::find_if(
      pairs_, [&](const Entry& entry) { return entry.pair.payload == pair.payload; });
  if (found != pairs_.end()) found->free = true;
}

}  // namespace ferry::detail
