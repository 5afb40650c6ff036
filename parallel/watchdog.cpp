// watchdog.cpp -- heartbeats in files, the wait that lasts too long, and one word of the end for all ranks.
#include "parallel/watchdog.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "memory/handle.h"

namespace moetrain::parallel {
namespace fs = std::filesystem;
namespace {

using Seconds = std::chrono::duration<double>;

void close_file(int descriptor) noexcept { ::close(descriptor); }
using File = Handle<int, close_file, -1>;

std::optional<int> number_in(const char* text) {
  if (!text || !*text) return {};
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return (*end == 0 || *end == '(' || *end == ',') && value >= 0 && value < std::numeric_limits<int>::max() ? std::optional(int(value)) : std::nullopt;
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Fields of /proc/PID/stat from 3 on: 3 is the state, 22 the time at which the process began. Empty: there is no such process.
std::string field_of(pid_t pid, int field) {
  const std::string line = first_line(("/proc/" + std::to_string(pid) + "/stat").c_str());
  std::size_t place = line.rfind(')');  // of its name, which may hold anything
  for (int f = 2; f < field && place != line.npos; ++f) place = line.find(' ', place + 1);
  return place == line.npos ? "" : line.substr(place + 1, line.find(' ', place + 1) - place - 1);
}
// Dead, also where its parent has not asked yet how it ended.
bool ended(pid_t pid) { return (::kill(pid, 0) != 0 && errno == ESRCH) || field_of(pid, 3) == "Z"; }

std::uint64_t hash_of(const void* data, std::size_t bytes) {
  std::uint64_t hash = bytes;
  for (std::size_t i = 0; i < bytes; i += sizeof hash) {
    std::uint64_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(data) + i, std::min(sizeof word, bytes - i));
    hash = mixed(hash, word);
  }
  return hash;
}

std::uint64_t this_host() {
  char names[512] = {}, space[64] = {};
  gethostname(names, 255);
  if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
  const std::string all = names + std::string(space) + first_line("/proc/sys/kernel/random/boot_id");
  return hash_of(all.data(), all.size());
}

std::string rank_file(const std::string& folder, int rank) { return folder + "/rank_" + std::to_string(rank); }
std::string word_file(const std::string& folder) { return folder + "/end"; }

std::optional<Status> read_status(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Status s;
  if (file.get() < 0 || ::pread(file.get(), &s, sizeof s, 0) != ssize_t(sizeof s)) return {};
  return s.sum == hash_of(&s, offsetof(Status, sum)) ? std::optional(s) : std::nullopt;
}

std::string standing(const Status& s) {
  std::string text = "in " + text_of(s.place);
  if (s.waiting || s.calls > 0) text += std::string(s.waiting ? ", waiting in " : ", after ") + text_of(s.last);
  return text;
}

std::string seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", s);
  return text;
}

}  // namespace

std::optional<Launched> launched(const Environment& environment) {
  // mpirun may itself have been started by srun, so its own variables go first; SLURM_NTASKS stands in a batch script too, which is no rank.
  struct Variables {
    const char *launcher, *ranks, *rank, *here;
  };
  constexpr Variables kKnown[] = {{"mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                                  {"a launcher of PMI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"},
                                  {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"}};  // 4(x2),3
  for (const Variables& known : kKnown) {
    const auto rank = number_in(environment(known.rank)), ranks = number_in(environment(known.ranks));
    if (!rank || !ranks || *rank >= *ranks) continue;
    // The launcher's own folder goes when it goes. Else one named by the process that started this one.
    const char* own = environment("PMIX_SERVER_TMPDIR");
    const std::string parent = own && ::access(own, W_OK) == 0 ? own : fs::temp_directory_path().string();
    return Launched{*rank,
                    *ranks,
                    number_in(environment(known.here)).value_or(*ranks),
                    parent + "/moetrain-" + std::to_string(getuid()) + "-" + std::to_string(getppid()) + "-" + field_of(getppid(), 22),
                    known.launcher,
                    std::string(known.ranks) + " " + environment(known.ranks) + ", " + known.rank + " " + environment(known.rank)};
  }
  return {};
}

Difference judge(const std::vector<Seen>& ranks, int me, int here, double waited_s) {
  // The one that came least far, of those that `fits`.
  const auto first = [&](auto&& fits) {
    int found = -1;
    for (int r = 0; r < int(ranks.size()); ++r)
      if (r != me && fits(ranks[std::size_t(r)]) &&
          (found < 0 || ranks[std::size_t(r)].status.calls < ranks[std::size_t(found)].status.calls))
        found = r;
    return found;
  };
  const auto named = [](int rank, const std::string& text) { return Difference{rank, "rank " + std::to_string(rank) + " " + text}; };
  const Status& mine = ranks[std::size_t(me)].status;
  const std::string here_stands = "; rank " + std::to_string(me) + " stands " + standing(mine);

  if (const int r = first([](const Seen& s) { return s.came && s.gone; }); r >= 0)
    return named(r, "is gone; it was last seen " + standing(ranks[std::size_t(r)].status));

  std::vector<int> absent;
  std::string list;
  for (int r = 0; r < int(ranks.size()); ++r)
    if (!ranks[std::size_t(r)].came) {
      list += (absent.empty() ? "" : ", ") + std::to_string(r);
      absent.push_back(r);
    }
  if (!absent.empty()) {
    const int all = int(ranks.size()), missing_here = here - (all - int(absent.size()));
    const std::string who = missing_here == int(absent.size()) ? (absent.size() == 1 ? "rank " : "ranks ") + list
                            : missing_here > 0                 ? std::to_string(missing_here) + " of the ranks " + list
                                                               : "one of the ranks " + list + " of other hosts";
    return {absent.front(), who + " did not come within " + seconds(waited_s) + here_stands};
  }

  std::vector<const std::array<Call, Journal::kRecent>*> recent;
  for (const Seen& s : ranks) recent.push_back(&s.status.recent);
  if (auto differs = first_difference(recent)) return *differs;

  if (const int r = first([&](const Seen& s) { return !s.status.left && s.silent_s > waited_s / 4; }); r >= 0)
    return named(r, "has not answered for " + seconds(ranks[std::size_t(r)].silent_s) +
                        ": it is stopped, or its host is lost; it was last seen " + standing(ranks[std::size_t(r)].status) + here_stands);
  if (const int r = first([](const Seen& s) { return s.status.left; }); r >= 0)
    return named(r, "has left the run, last seen " + standing(ranks[std::size_t(r)].status) + here_stands);
  if (const int r = first([](const Seen& s) { return !s.status.waiting; }); r >= 0)
    return named(r, "is late by " + seconds(waited_s) + ": it is " + standing(ranks[std::size_t(r)].status) + here_stands);
  if (const int r = first([&](const Seen& s) { return s.status.calls < mine.calls; }); r >= 0)
    return named(r, "waits for others itself, " + standing(ranks[std::size_t(r)].status) + here_stands);
  if (const int r = first([&](const Seen& s) { return s.status.calls > mine.calls; }); r >= 0)
    return named(me, "is behind the others after " + seconds(waited_s) + ", " + standing(mine) + "; rank " + std::to_string(r) + " stands " +
                         standing(ranks[std::size_t(r)].status));
  return {me, "all ranks have waited for " + seconds(waited_s) + " " + standing(mine) + ": the network or a device stands still"};
}

Watchdog::Watchdog(const Launched& launched, double limit_s, Tell tell)
    : launched_(launched),
      tell_(std::move(tell)),
      host_(this_host()),
      limit_s_(limit_s),
      folder_(launched.folder),
      seen_(std::size_t(launched.ranks)),
      changed_s_(std::size_t(launched.ranks)) {
  std::error_code there_is_none;  // then nobody sees this rank, and it sees nobody: its waits are bounded all the same
  fs::create_directory(folder_, there_is_none);
  publish();
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stopping_.notify_all();
  thread_.join();
  close_folder();
}

// The last rank to leave clears the folder.
void Watchdog::close_folder() {
  publish(/*left=*/true);
  for (int r = 0; r < launched_.ranks; ++r)
    if (const auto other = read_status(rank_file(folder_, r)); !other || !other->left) return;
  std::error_code others_did;
  fs::remove_all(folder_, others_did);
}

void Watchdog::limit(double seconds) {
  const std::lock_guard lock(mutex_);
  limit_s_ = seconds;
}

void Watchdog::move_to(const std::string& folder) {
  const std::lock_guard lock(mutex_);
  close_folder();
  folder_ = folder;
  seen_.assign(seen_.size(), {});
  publish();
}

void Watchdog::publish(bool left) {
  const Journal::State state = journal_->state();
  Status& s = seen_[std::size_t(launched_.rank)].status;
  s = Status{.host = host_,
             .pid = getpid(),
             .beat = ++beat_,
             .calls = state.calls,
             .place = state.place,
             .waiting = state.waiting,
             .left = left,
             .last = state.last,
             .recent = state.recent};
  s.sum = hash_of(&s, offsetof(Status, sum));
  seen_[std::size_t(launched_.rank)].came = true;
  if (state.waits != wait_ || !state.waiting) wait_ = state.waits, waited_s_ = 0;
  // Closed each time, for then a disk shared over a network shows it to other hosts. Nothing can be done about one that does not take
  // it: the others see a rank that does not answer.
  const File file(::open(rank_file(folder_, launched_.rank).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (file.get() >= 0 && ::pwrite(file.get(), &s, sizeof s, 0) < 0) return;
}

void Watchdog::watch() {
  auto before = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    const double beat_s = std::clamp(limit_s_ / 20, 0.05, 1.0);
    stopping_.wait_for(lock, Seconds(beat_s), [&] { return stopped_; });
    if (stopped_) return;
    const auto now = std::chrono::steady_clock::now();
    // A beat that came much too late was not a wait: the whole job may have been stopped and gone on.
    const double passed_s = std::min(Seconds(now - before).count(), beat_s + 1);
    before = now;
    leave_if_told();
    clock_s_ += passed_s;
    waited_s_ += passed_s;
    publish();
    // One that does not wait looks too: it may be stuck in a call that nobody booked, to its device for example.
    const bool in_turn = clock_s_ - looked_s_ > limit_s_ / 4;
    if (waited_s_ == 0 && !in_turn) continue;
    if (in_turn) looked_s_ = clock_s_;
    bool silent = false;
    for (int r = 0; r < launched_.ranks; ++r) {
      const Seen& s = seen_[std::size_t(r)];
      if (!s.came || in_turn || waited_s_ > limit_s_ / 2) read(r);
      silent = silent || (s.came && !s.status.left && s.silent_s > limit_s_);
    }
    if (silent || waited_s_ > limit_s_ || any_gone())
      end(judge(seen_, launched_.rank, launched_.here, silent ? std::max(waited_s_, limit_s_) : waited_s_));
  }
}

void Watchdog::read(int rank) {
  if (rank == launched_.rank) return;
  Seen& s = seen_[std::size_t(rank)];
  if (const auto now = read_status(rank_file(folder_, rank)); now && now->beat != s.status.beat) {
    s.came = true;
    s.status = *now;
    changed_s_[std::size_t(rank)] = clock_s_;
  }
  s.silent_s = clock_s_ - changed_s_[std::size_t(rank)];
}

// A process of this host that ended without having left in order.
bool Watchdog::any_gone() {
  bool any = false;
  for (int r = 0; r < launched_.ranks; ++r) {
    Seen& s = seen_[std::size_t(r)];
    if (r == launched_.rank || !s.came || s.status.left || s.status.host != host_ || !ended(pid_t(s.status.pid))) continue;
    read(r);  // its last word
    s.gone = !s.status.left;
    any = any || s.gone;
  }
  return any;
}

void Watchdog::leave_if_told() const {
  const std::string word = first_line(word_file(folder_).c_str());
  if (!word.empty()) std::_Exit(std::atoi(word.c_str()));
}

// Tells of an end if it is the first of the job, and then leaves word of it.
bool Watchdog::claim(ExitCode code, const std::string& cause, int rank) {
  const File word(::open(word_file(folder_).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (word.get() < 0 && errno == EEXIST) return false;
  tell_(code, cause, rank);
  const std::string text = std::to_string(int(code)) + "\n";
  if (word.get() >= 0 && ::write(word.get(), text.data(), text.size()) < 0) return true;  // the others come to their own limit
  return true;
}

bool Watchdog::failed(ExitCode code, const std::string& cause) {
  const std::lock_guard lock(mutex_);
  return claim(code, cause, launched_.rank);
}

void Watchdog::lost(const std::string& cause) {
  std::unique_lock lock(mutex_);
  const double moment_s = std::min(1.0, limit_s_) / 10;
  for (int tries = 0; tries < 10; ++tries) {
    publish();
    for (int r = 0; r < launched_.ranks; ++r) read(r);
    leave_if_told();
    if (any_gone()) end(judge(seen_, launched_.rank, launched_.here, 0));
    std::vector<const std::array<Call, Journal::kRecent>*> recent;
    for (const Seen& s : seen_) recent.push_back(s.came ? &s.status.recent : nullptr);
    if (const auto differs = first_difference(recent)) end(*differs);
    stopping_.wait_for(lock, Seconds(moment_s));
  }
  end({launched_.rank, "rank " + std::to_string(launched_.rank) + ": " + cause + "; it stands " + standing(seen_[std::size_t(launched_.rank)].status)});
}

// Called with the mutex held; whatever telling may hang on, the process ends.
void Watchdog::end(const Difference& found) {
  std::thread([] {
    std::this_thread::sleep_for(Seconds(5));
    std::_Exit(int(ExitCode::rank_lost));
  }).detach();
  if (!claim(ExitCode::rank_lost, found.text, found.rank))
    while (true) {  // until who came first has said all
      leave_if_told();
      std::this_thread::sleep_for(Seconds(0.05));
    }
  std::_Exit(int(ExitCode::rank_lost));
}

}  // namespace moetrain::parallel
