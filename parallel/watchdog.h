// watchdog.h -- a thread beside a rank that ends the process when another rank is lost, also while MPI or NCCL hold the rank itself.
#pragma once
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "memory/check.h"
#include "parallel/journal.h"

namespace moetrain::parallel {

// What a launcher tells a process before MPI is up.
struct Launched {
  int rank = 0, ranks = 1;
  int here = 1;        // ranks on this host
  std::string folder;  // of this host, the same for its ranks and for no other job: may not be there yet
  std::string launcher, variables;  // who says so, in which words
};
using Environment = std::function<const char*(const char* name)>;  // null: not set
// Nothing: not started by a launcher that says so.
std::optional<Launched> launched(const Environment& environment = [](const char* name) -> const char* { return std::getenv(name); });

// What a rank lets the others see; plain bytes, in a file that it alone writes.
struct Status {
  std::uint64_t host = 0;  // and process namespace: where its pid means something
  std::int64_t pid = 0;
  std::uint64_t beat = 0;  // counts on while its watchdog lives
  std::uint64_t calls = 0;
  Place place;
  bool waiting = false, left = false;  // left: in order
  Call last;
  std::array<Call, Journal::kRecent> recent;
  std::uint64_t sum = 0;  // of all before it: a file read while it was written is not believed
};

// What a rank knows of another.
struct Seen {
  bool came = false, gone = false;  // gone: its process is no more
  double silent_s = 0;              // since its last new beat
  Status status;
};

// Who holds the run up when rank `me` has waited for `waited_s`; in the order of what explains most: gone, never came, differs, does
// not answer, late, waits elsewhere. `here` ranks are of this host, and only those can be seen at the start.
Difference judge(const std::vector<Seen>& ranks, int me, int here, double waited_s);

// The ranks of a job watch each other through files of a folder, one a rank, since files reach from the first moment on one host, and
// over hosts as far as the run folder does. Whoever first finds a rank lost says so and leaves word; the others read it and leave too.
class Watchdog {
 public:
  // What is said of the end: to people, and in exit.json. Called by one rank, from any thread.
  using Tell = std::function<void(ExitCode code, const std::string& cause, int rank)>;
  // limit_s: how long this rank may wait for others.
  Watchdog(const Launched& launched, double limit_s, Tell tell);
  ~Watchdog();  // the rank leaves in order
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  const std::shared_ptr<Journal>& journal() const { return journal_; }
  void limit(double seconds);
  void move_to(const std::string& folder);  // that is there and seen by all ranks
  // This rank failed alone: tells it and leaves word for the others, who end too. False: another end was told first. The caller ends
  // the process.
  [[nodiscard]] bool failed(ExitCode code, const std::string& cause);
  // A call failed for which a lost rank is the likely cause: names that rank if it shows within a moment, and ends the process.
  [[noreturn]] void lost(const std::string& cause);

 private:
  void watch();
  void publish(bool left = false);
  void read(int rank);
  bool any_gone();
  void leave_if_told() const;
  bool claim(ExitCode code, const std::string& cause, int rank);
  [[noreturn]] void end(const Difference& found);
  void close_folder();

  const Launched launched_;
  const Tell tell_;
  const std::shared_ptr<Journal> journal_ = std::make_shared<Journal>();
  const std::uint64_t host_;
  mutable std::mutex mutex_;  // of all below
  std::condition_variable stopping_;
  bool stopped_ = false;
  double limit_s_;
  std::string folder_;
  std::uint64_t beat_ = 0, wait_ = 0;  // wait_: the journal's number of the one that lasts
  double clock_s_ = 0, waited_s_ = 0;  // of beats: time in which this process was stopped itself does not count
  double looked_s_ = 0;                // clock_s_ when it last looked at all others
  std::vector<Seen> seen_;
  std::vector<double> changed_s_;  // clock_s_ when a rank last showed a new beat
  std::thread thread_;
};

}  // namespace moetrain::parallel
