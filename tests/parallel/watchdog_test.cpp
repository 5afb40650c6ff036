// watchdog_test.cpp -- ranks as plain processes: no MPI is needed to see who differs, stops, dies, is late or never comes.
#include "parallel/watchdog.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "parallel/communicator.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::parallel;
using test::contains;

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kLimit = 3;  // seconds: more than a busy machine keeps a process waiting

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::string contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Four processes that each do what a rank of a job would, and what became of them.
class Job {
 public:
  using Body = std::function<void(Watchdog&, int rank)>;
  explicit Job(const Body& body, int started = kRanks) {
    std::filesystem::create_directory(board());
    for (int r = 0; r < started; ++r) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        const std::string told = folder_ / "told";
        {
          Watchdog dog({r, kRanks, kRanks, board()}, kLimit, [&](ExitCode code, const std::string& cause, int rank) {
            std::ofstream(told, std::ios::app) << int(code) << " of rank " << rank << ": " << cause << "\n";
          });
          body(dog, r);
        }
        std::_Exit(0);
      }
      pids_.push_back(pid);
    }
  }
  ~Job() {
    for (const pid_t pid : pids_) ::kill(pid, SIGKILL);
    while (::wait(nullptr) > 0) {
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  static constexpr int kRanks = 4;
  void signal(int rank, int number) const { ::kill(pids_[std::size_t(rank)], number); }
  int exit_code(int rank) {  // -number where a signal ended it
    int status = 0;
    REQUIRE(::waitpid(pids_[std::size_t(rank)], &status, 0) == pids_[std::size_t(rank)]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  std::string told() const { return contents(folder_ / "told"); }
  std::string board() const { return folder_ / "board"; }

 private:
  test::TempFolder folder_;
  Clock::time_point start_ = Clock::now();
  std::vector<pid_t> pids_;
};

Group world_of(int rank) { return group_of("world", 1, rank, Job::kRanks); }

// A collective that never ends.
[[noreturn]] void wait_in(Watchdog& dog, int rank, Op op, std::int64_t count) {
  Group group = world_of(rank);
  const Journal::Wait waiting(dog.journal().get(), dog.journal()->note(group, op, count, DType::f32));
  sleep_for(60);
  std::_Exit(1);
}

int lines(const std::string& text) { return int(std::count(text.begin(), text.end(), '\n')); }

}  // namespace

TEST_CASE("the balance of all ranks is nought as long as they make the same collectives, and no longer", "[parallel][cpu]") {
  struct Change {
    const char* what;
    Op op;
    std::int64_t count;
    DType dtype;
    std::uint64_t pieces;
    Place place;
    const char* group;
  };
  const Change right{"nothing", Op::all_reduce, 3, DType::f64, 7, {Phase::forward, 2}, "world"};
  std::vector<Change> changes(8, right);
  changes[1].what = "operation", changes[1].op = Op::broadcast;
  changes[2].what = "count", changes[2].count = 4;
  changes[3].what = "dtype", changes[3].dtype = DType::f32;
  changes[4].what = "pieces", changes[4].pieces = 8;
  changes[5].what = "phase", changes[5].place.phase = Phase::backward;
  changes[6].what = "layer", changes[6].place.layer = 3;
  changes[7].what = "group", changes[7].group = "dense";
  for (const Change& change : changes)
    for (int odd = 0; odd < 3; ++odd) {
      CAPTURE(change.what, odd);
      std::uint64_t sum = 0;
      for (int r = 0; r < 3; ++r) {
        const Change& mine = r == odd ? change : right;
        Journal journal;
        Group group = group_of(mine.group, 1, r, 3), other = group_of("other", 10 + std::uint64_t(r), 0, 1);
        journal.at({Phase::step});
        journal.note(group, Op::barrier);
        journal.note(other, Op::all_gather, r);  // of one rank: nobody to agree with
        journal.at(mine.place);
        journal.note(group, mine.op, mine.count, mine.dtype, mine.pieces);
        sum += journal.balance();
      }
      CHECK((sum == 0) == (&change == &changes[0]));
    }
}

TEST_CASE("the first collective in which a rank differs is named, with that of the others", "[parallel][cpu]") {
  const auto found = [](const std::function<void(Journal&, int)>& body, int ranks) {
    std::vector<Journal::State> states;
    for (int r = 0; r < ranks; ++r) {
      Journal journal;
      body(journal, r);
      states.push_back(journal.state());
    }
    std::vector<const std::array<Call, Journal::kRecent>*> recent;
    for (const auto& s : states) recent.push_back(&s.recent);
    return first_difference(recent);
  };
  // Two groups of two, of other sizes each: that is no difference.
  CHECK_FALSE(found([](Journal& j, int r) {
    Group pair = group_of("dense", std::uint64_t(r / 2), r % 2, 2);
    for (int n = 0; n < 300; ++n) j.note(pair, Op::all_gather, 10 + r / 2);
  }, 4));
  const auto skipped = found([](Journal& j, int r) {
    Group all = group_of("world", 1, r, 4), pair = group_of("dense", 2 + std::uint64_t(r / 2), r % 2, 2);
    j.note(all, Op::barrier);
    j.at({Phase::forward, 5});
    if (r != 2) j.note(pair, Op::all_gather, 64);
    j.note(all, Op::all_reduce, 3, DType::f64);
  }, 4);
  REQUIRE(skipped);
  CHECK(skipped->rank == 2);
  CHECK(skipped->text == "rank 2 differs from the others: it is in collective 2, all-reduce of 3 fp64 over world (4 ranks) in forward, layer 5; "
                         "the others are in collective 2, all-gather of 64 bytes over dense (2 ranks) in forward, layer 5");
  const auto longer = found([](Journal& j, int r) {
    Group all = world_of(r);
    j.note(all, Op::broadcast, r == 3 ? 100 : 200);
  }, 4);
  REQUIRE(longer);
  CHECK(longer->rank == 3);
  CHECK(contains(longer->text, "broadcast of 100 bytes"));
  CHECK(contains(longer->text, "broadcast of 200 bytes"));
}

TEST_CASE("ranks that leave in order are told of nobody and leave nothing behind", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    Group group = world_of(rank);
    for (int n = 0; n < 3; ++n) {
      const Journal::Wait waiting(dog.journal().get(), dog.journal()->note(group, Op::barrier));
      sleep_for(0.1 + 0.1 * rank);  // rank 3 is there long after rank 0 has gone
    }
  });
  for (int r = 0; r < Job::kRanks; ++r) CHECK(job.exit_code(r) == 0);
  CHECK(job.told().empty());
  CHECK_FALSE(std::filesystem::exists(job.board()));
}

TEST_CASE("a rank that is stopped is named with what it was last seen in, and the others end with 4 in time", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    dog.journal()->at({Phase::forward, 3});
    if (rank != 2) wait_in(dog, rank, Op::all_reduce, 3);
    sleep_for(0.3);
    ::raise(SIGSTOP);
  });
  for (const int r : {0, 1, 3}) CHECK(job.exit_code(r) == 4);
  CHECK(job.seconds() < kLimit + 3);
  CHECK(lines(job.told()) == 1);
  CHECK(contains(job.told(), "4 of rank 2: rank 2 has not answered for "));
  CHECK(contains(job.told(), "last seen in forward, layer 3"));
}

TEST_CASE("a rank that dies is named at once, long before the limit", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    dog.journal()->at({Phase::save});
    dog.limit(30);
    if (rank != 1) wait_in(dog, rank, Op::barrier, 0);
    sleep_for(3);
    ::raise(SIGKILL);
  });
  CHECK(job.exit_code(1) == -SIGKILL);
  for (const int r : {0, 2, 3}) CHECK(job.exit_code(r) == 4);
  CHECK(job.seconds() < 3 + 8);
  CHECK(lines(job.told()) == 1);
  CHECK(contains(job.told(), "4 of rank 1: rank 1 is gone; it was last seen in save"));
}

TEST_CASE("a rank that never comes, one that works on, and one in another collective are each called so", "[parallel][cpu]") {
  {
    Job job([](Watchdog& dog, int rank) { wait_in(dog, rank, Op::barrier, 0); }, 3);
    for (const int r : {0, 1, 2}) CHECK(job.exit_code(r) == 4);
    CHECK(contains(job.told(), "4 of rank 3: rank 3 did not come within "));
    CHECK(lines(job.told()) == 1);
  }
  {
    Job job([](Watchdog& dog, int rank) {
      dog.journal()->at({Phase::load});
      if (rank != 0) wait_in(dog, rank, Op::barrier, 0);
      sleep_for(60);
    });
    for (const int r : {0, 1, 2, 3}) CHECK(job.exit_code(r) == 4);  // the late one too, by the word of the others
    CHECK(job.seconds() < kLimit + 3);
    CHECK(contains(job.told(), "4 of rank 0: rank 0 is late by "));
    CHECK(contains(job.told(), "it is in load; rank "));
    CHECK(lines(job.told()) == 1);
  }
  {
    Job job([](Watchdog& dog, int rank) { wait_in(dog, rank, rank == 3 ? Op::broadcast : Op::all_reduce, 5); });
    for (const int r : {0, 1, 2, 3}) CHECK(job.exit_code(r) == 4);
    CHECK(contains(job.told(), "4 of rank 3: rank 3 differs from the others: it is in collective 1, broadcast of 5 fp32"));
    CHECK(lines(job.told()) == 1);
  }
}

TEST_CASE("a rank that fails alone takes the others along with its own code", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    if (rank != 2) wait_in(dog, rank, Op::barrier, 0);
    if (!dog.failed(ExitCode::run_failed, "the disk is full")) std::_Exit(1);
    sleep_for(60);
  });
  for (int r = 0; r < Job::kRanks; ++r) CHECK(job.exit_code(r) == 3);
  CHECK(job.told() == "3 of rank 2: the disk is full\n");
}

TEST_CASE("of a call that failed because a rank was lost that rank is named, and without one the call", "[parallel][cpu]") {
  {
    Job job([](Watchdog& dog, int rank) {
      if (rank == 1) ::raise(SIGKILL);
      sleep_for(0.2);
      if (rank == 2) dog.lost("a call failed");
      wait_in(dog, rank, Op::barrier, 0);
    });
    for (const int r : {0, 2, 3}) CHECK(job.exit_code(r) == 4);
    CHECK(contains(job.told(), "4 of rank 1: rank 1 is gone"));
  }
  {
    Job job([](Watchdog& dog, int rank) {
      if (rank == 2) dog.lost("a call failed");
      sleep_for(60);
    });
    for (int r = 0; r < Job::kRanks; ++r) CHECK(job.exit_code(r) == 4);
    CAPTURE(job.told());
    CHECK(contains(job.told(), "4 of rank 2: rank 2: a call failed; it stands in start"));
  }
}

TEST_CASE("a job that is stopped as a whole for longer than the limit goes on", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    Group group = world_of(rank);
    dog.limit(6);
    const Journal::Wait waiting(dog.journal().get(), dog.journal()->note(group, Op::barrier));
    for (int n = 0; n < 40; ++n) sleep_for(0.03);
  });
  sleep_for(0.5);
  for (int r = 0; r < Job::kRanks; ++r) job.signal(r, SIGSTOP);
  sleep_for(10);
  for (int r = 0; r < Job::kRanks; ++r) job.signal(r, SIGCONT);
  for (int r = 0; r < Job::kRanks; ++r) CHECK(job.exit_code(r) == 0);
  CHECK(job.told().empty());
}

TEST_CASE("ranks that move to another folder see each other there", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    const std::string shared = std::filesystem::temp_directory_path() / ("moetrain_moved_" + std::to_string(::getppid()));
    std::filesystem::create_directory(shared);
    dog.move_to(shared);
    dog.journal()->at({Phase::backward});
    if (rank == 1) {
      sleep_for(0.3);
      ::raise(SIGSTOP);
    }
    wait_in(dog, rank, Op::barrier, 0);
  });
  for (const int r : {0, 2, 3}) CHECK(job.exit_code(r) == 4);
  CHECK(contains(job.told(), "4 of rank 1: rank 1 has not answered for "));
  CHECK(contains(job.told(), "last seen in backward"));
  CHECK_FALSE(std::filesystem::exists(job.board()));
  std::filesystem::remove_all(std::filesystem::temp_directory_path() / ("moetrain_moved_" + std::to_string(::getpid())));
}

TEST_CASE("a rank that is stopped is lost also where nobody is known to wait for it", "[parallel][cpu]") {
  Job job([](Watchdog& dog, int rank) {
    Group group = world_of(rank);
    dog.journal()->note(group, Op::broadcast, 1);
    sleep_for(0.3);
    if (rank == 2) ::raise(SIGSTOP);
    sleep_for(60);
  });
  for (const int r : {0, 1, 3}) CHECK(job.exit_code(r) == 4);
  CHECK(job.seconds() < 2 * kLimit + 3);
  CHECK(lines(job.told()) == 1);
  CHECK(contains(job.told(), "4 of rank 2: rank 2 has not answered for "));
  CHECK(contains(job.told(), "after collective 1, broadcast of 1 bytes over world (4 ranks) in start"));
}
