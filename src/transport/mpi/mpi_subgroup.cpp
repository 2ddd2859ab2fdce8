// How the ranks of a sub-group meet; see mpi_subgroup.hpp. The first rank of the list calls each
// other one, hears from each that it is here for this very call, and then tells all of them to go
// on, or that it has given up. What a meeting that failed leaves behind carries another number, and
// is passed over. Whoever has answered a call has more patience than the first rank, so that nobody
// is left alone in MPI_Comm_create_group.

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

constexpr int kLeaderTag = SubgroupComms::kFirstTag;
constexpr int kHereTag = SubgroupComms::kFirstTag + 1;
constexpr int kCreateTag = SubgroupComms::kFirstTag + 2;
constexpr double kPatience = 1.25;  // of those who wait for the verdict
constexpr double kLeastPatience_s = 5;

enum class Say : std::uint64_t { call = 1, here = 2, go_on = 3, give_up = 4 };

/// One message of a meeting.
struct Word {
  std::uint64_t list = 0;    ///< hash of the ranks
  std::uint64_t number = 0;  ///< of the leader's calls
  Say say = Say::call;
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
    for (const int rank : others()) send(rank, kLeaderTag, {list_, number_, Say::call});
    const double end_s = base::now_s() + deadline_s;
    std::optional<Error> refusal;
    try {
      for (const int rank : others()) {
        while (true) {
          const Word word = receive(rank, kHereTag, end_s, deadline_s);
          if (word.list == list_ && word.number == number_) break;
        }
      }
    } catch (const Error& error) {
      refusal = error;
    }
    const Say verdict = refusal ? Say::give_up : Say::go_on;
    for (const int rank : others()) send(rank, kLeaderTag, {list_, number_, verdict});
    if (refusal) throw Error(*refusal);
  }

  void follow(double deadline_s) {
    const int leader = ranks_.front();
    const double own_end_s = base::now_s() + deadline_s;
    double end_s = own_end_s;
    std::optional<std::uint64_t> answered;
    while (true) {
      const Word word = receive(leader, kLeaderTag, end_s, deadline_s);
      another_list_ = word.list != list_;
      if (another_list_) continue;
      switch (word.say) {
        case Say::call:
          answered = word.number;
          send(leader, kHereTag, {list_, word.number, Say::here});
          end_s = base::now_s() + deadline_s * kPatience + kLeastPatience_s;
          break;
        case Say::go_on:
          if (answered == word.number) return;
          break;
        case Say::give_up: end_s = own_end_s; break;  // it may call again
        case Say::here: break;
      }
    }
  }

  std::vector<int> others() const { return {ranks_.begin() + 1, ranks_.end()}; }

  // Nobody waits for a send: its memory is kept until it is done, which may be never.
  void send(int target, int tag, const Word& word) {
    const auto letter = std::make_shared<Letter>(Letter{.word = word});
    check_mpi(
        MPI_Isend(&letter->word, sizeof(Word), MPI_BYTE, target, tag, comm_, &letter->request),
        "MPI_Isend");
    int done = 0;
    check_mpi(MPI_Test(&letter->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done == 0) base::keep_forever(letter);
  }

  Word receive(int source, int tag, double end_s, double waited_s) {
    const auto letter = std::make_shared<Letter>();
    check_mpi(
        MPI_Irecv(&letter->word, sizeof(Word), MPI_BYTE, source, tag, comm_, &letter->request),
        "MPI_Irecv");
    wait_for_letter(letter, source, end_s, waited_s);
    return letter->word;
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
  bool another_list_ = false;  ///< the last word of the leader was of another list
};

}  // namespace

MPI_Comm SubgroupComms::of(const std::vector<int>& ranks, const CommPair& whole, double deadline_s,
                           const std::function<void()>& look) {
  Meeting(ranks, whole, num_calls_++, look).run(deadline_s);
  if (const auto known = known_.find(ranks); known != known_.end()) return known->second;
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  MPI_Comm made = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(whole.payload, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(whole.payload, some, kCreateTag, &made), "MPI_Comm_create_group");
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  check_mpi(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  known_.emplace(ranks, made);
  return made;
}

}  // namespace ferry::detail
