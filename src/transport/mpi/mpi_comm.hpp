#pragma once
// MPI calls as Ferry makes them: errors are returned and become ferry::Error with MPI's text,
// waiting has a deadline, and lengths have 64 bits.

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace ferry::detail {

/// Throws peer_failed with MPI's text unless `code` is MPI_SUCCESS.
void check_mpi(int code, std::string_view call);

/// A collective call of a few bytes that has a deadline, and the memory that MPI works on.
struct Collective {
  MPI_Request request = MPI_REQUEST_NULL;
  std::vector<std::byte> out;
  std::vector<std::byte> in;
  MPI_Comm made = MPI_COMM_NULL;
};
/// Tests until the call is complete, leaving the core to others in between.
/// Errors: timeout, naming `what`. A call that is not complete is kept for ever, with its memory:
///         the other ranks may come later.
void wait_for(const std::shared_ptr<Collective>& call, double deadline_s, std::string_view what);

/// A message as MPI takes it. An int counts up to 2 GiB; longer ones are split into blocks by a
/// datatype of their own.
class MpiBytes {
 public:
  explicit MpiBytes(std::uint64_t bytes);
  MpiBytes(const MpiBytes&) = delete;
  MpiBytes& operator=(const MpiBytes&) = delete;
  ~MpiBytes();

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

/// Length of a received or probed message.
std::uint64_t message_bytes(const MPI_Status& status);

/// Two communicators with the ranks of one that a program gave: payload apart from the rest, so
/// that a probe for the rest never finds payload.
struct CommPair {
  MPI_Comm payload = MPI_COMM_NULL;
  MPI_Comm others = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  /// Tags of this use of the pair begin here; a message that an earlier use left behind has others.
  int first_tag = 0;
};

/// The pairs made from one communicator, kept with it. They are used again rather than freed: a
/// message that nobody took must never be delivered to a communicator that came later.
class CommPairs {
 public:
  static constexpr int kTags = 4;  ///< of one use

  /// Those of `comm`, found by an attribute of it. Shared by the communicator and the transports:
  /// a program may free its communicator while they live.
  static std::shared_ptr<CommPairs> of(MPI_Comm comm);
  explicit CommPairs(MPI_Comm comm) : comm_(comm) {}

  /// Collective. Errors: timeout, peer_failed
  CommPair take(double deadline_s);
  void give_back(const CommPair& pair);

 private:
  struct Entry {
    CommPair pair;
    bool free = false;
    int uses = 0;
  };

  std::size_t agree_on_free(double deadline_s);

  MPI_Comm comm_;
  std::vector<Entry> pairs_;
};

}  // namespace ferry::detail
