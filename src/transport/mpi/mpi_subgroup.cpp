// How the ranks of a sub-group meet; see mpi_subgroup.hpp. The first rank of the list tells each
// other one that it is here, hears the same from each, and then tells all of them to go on or to
// give up. Whoever waits for that has more patience than the first rank, so that nobody is left
// alone in MPI_Comm_create_group.

#include "transport/mpi/mpi_subgroup.hpp"

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "base/hash.hpp"
#include "base/keep_forever.hpp"
#include "ferry/error.hpp"

namespace ferry::detail {

namespace {

constexpr int kHereTag = SubgroupComms::kFirstTag;
constexpr int kVerdictTag = SubgroupComms::kFirstTag + 1;
constexpr int kCreateTag = SubgroupComms::kFirstTag + 2;
constexpr double kPatience = 1.25;  // of those who wait for the verdict
constexpr double kLeastPatience_s = 5;

/// One message of a meeting. Open MPI and MPICH send so few bytes at once.
struct Word {
  std::uint64_t list = 0;  ///< hash of the ranks
  std::uint64_t number = 0;
  std::uint64_t value = 0;  ///< of a verdict: 1 = go on
};

struct Letter {
  Word word;
  MPI_Request request = MPI_REQUEST_NULL;
};

class Meeting {
 public:
  Meeting(const std::vector<int>& ranks, const CommPair& whole, std::uint64_t number,
          const std::function<void()>& look)
      : ranks_(ranks), comm_(whole.payload), rank_(whole.rank), number_(number), look_(look) {
    for (const int rank : ranks)
      list_ = base::combine_hash(list_, static_cast<std::uint64_t>(rank));
  }

  void run(double deadline_s) {
    if (rank_ == ranks_.front()) {
      lead(deadline_s);
    } else {
      follow(deadline_s);
    }
  }

 private:
  void lead(double deadline_s) {
    for (const int rank : others()) send(rank, kHereTag, 1);
    const double end_s = base::now_s() + deadline_s;
    std::optional<Error> refusal;
    for (const int rank : others()) {
      try {
        receive(rank, kHereTag, end_s, deadline_s);
      } catch (const Error& error) {
        refusal = error;
        break;
      }
    }
    for (const int rank : others()) send(rank, kVerdictTag, refusal ? 0 : 1);
    if (refusal) throw Error(*refusal);
  }

  void follow(double deadline_s) {
    const int leader = ranks_.front();
    send(leader, kHereTag, 1);
    receive(leader, kHereTag, base::now_s() + deadline_s, deadline_s);
    const double patience_s = deadline_s * kPatience + kLeastPatience_s;
    const Word verdict = receive(leader, kVerdictTag, base::now_s() + patience_s, patience_s);
    if (verdict.value == 1) return;
    throw Error(ErrorCode::timeout,
                fmt::format("subgroup: rank {} gave up on a rank that did not come; fix: call it "
                            "on every rank of the list",
                            leader));
  }

  std::vector<int> others() const { return {ranks_.begin() + 1, ranks_.end()}; }

  // Nobody waits for a send: its memory is kept until it is done, which may be never.
  void send(int target, int tag, std::uint64_t value) {
    const auto letter = std::make_shared<Letter>();
    letter->word = {.list = list_, .number = number_, .value = value};
    check_mpi(
        MPI_Isend(&letter->word, sizeof(Word), MPI_BYTE, target, tag, comm_, &letter->request),
        "MPI_Isend");
    int done = 0;
    check_mpi(MPI_Test(&letter->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) base::keep_forever(letter);
  }

  /// The word of this meeting. Others are passed over: a meeting that failed left them behind, or
  /// the ranks disagree, which shows when no right one comes.
  Word receive(int source, int tag, double end_s, double waited_s) {
    another_list_ = false;
    while (true) {
      const auto letter = std::make_shared<Letter>();
      check_mpi(
          MPI_Irecv(&letter->word, sizeof(Word), MPI_BYTE, source, tag, comm_, &letter->request),
          "MPI_Irecv");
      wait_for_letter(letter, source, end_s, waited_s);
      if (letter->word.list == list_ && letter->word.number == number_) return letter->word;
      another_list_ = letter->word.list != list_;
    }
  }

  void wait_for_letter(const std::shared_ptr<Letter>& letter, int source, double end_s,
                       double waited_s) {
    try {
      while (true) {
        int done = 0;
        check_mpi(MPI_Test(&letter->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
        if (done != 0) return;
        look_();
        if (base::now_s() > end_s && another_list_) {
          throw Error(ErrorCode::mismatch,
                      fmt::format("subgroup: ranks {} and {} make sub-groups of different ranks; "
                                  "fix: make them in the same order, with the same lists",
                                  rank_, source));
        }
        if (base::now_s() > end_s) {
          throw Error(ErrorCode::timeout,
                      fmt::format("subgroup: rank {} waited {:.3g} s for rank {}; fix: call it on "
                                  "every rank of the list, or raise deadline_s",
                                  rank_, waited_s, source));
        }
        std::this_thread::yield();
      }
    } catch (...) {
      take_back(letter);
      throw;
    }
  }

  static void take_back(const std::shared_ptr<Letter>& letter) {
    base::keep_forever(letter);
    if (letter->request == MPI_REQUEST_NULL) return;
    if (MPI_Cancel(&letter->request) == MPI_SUCCESS) MPI_Request_free(&letter->request);
  }

  const std::vector<int>& ranks_;
  MPI_Comm comm_;
  int rank_;
  std::uint64_t number_;
  const std::function<void()>& look_;
  std::uint64_t list_ = 0;
  bool another_list_ = false;  ///< the last word of whoever is waited for was of another list
};

}  // namespace

MPI_Comm SubgroupComms::of(const std::vector<int>& ranks, const CommPair& whole, double deadline_s,
                           const std::function<void()>& look) {
  Entry& entry = known_[ranks];
  // Each time: what follows on a known communicator is collective, too, and cannot be taken back.
  Meeting(ranks, whole, entry.num_calls++, look).run(deadline_s);
  if (entry.comm != MPI_COMM_NULL) return entry.comm;
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(whole.payload, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(whole.payload, some, kCreateTag, &entry.comm),
            "MPI_Comm_create_group");
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  check_mpi(MPI_Comm_set_errhandler(entry.comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return entry.comm;
}

}  // namespace ferry::detail
