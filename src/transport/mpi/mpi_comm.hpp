#pragma once
// MPI calls as Ferry makes them: errors are returned and become ferry::Error with MPI's text,
// waiting has a deadline, and lengths have 64 bits.

#include <mpi.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "transport/mpi/mpi_end.hpp"

namespace ferry::detail {

/// Throws peer_failed with MPI's text unless `code` is MPI_SUCCESS.
void check_mpi(int code, std::string_view call);

/// Tests until the request is complete, leaving the core to others in between.
/// Errors: timeout, naming `what`; the request is then left alone, with the memory it works on.
void wait_for_request(MPI_Request& request, double deadline_s, std::string_view what);

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
class CommPairs final : public MpiEndListener {
 public:
  static constexpr int kTags = 4;  ///< of one use

  /// Those of `comm`, found by an attribute of it.
  static CommPairs& of(MPI_Comm comm);
  explicit CommPairs(MPI_Comm comm) : comm_(comm) {}

  void mpi_ends() override { free_all(); }

  /// Collective. Errors: timeout, peer_failed
  CommPair take(double deadline_s);
  void give_back(const CommPair& pair);
  /// Frees the pairs that nobody uses.
  void free_all();

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
