// journal.cpp -- collectives booked and hashed, and the first one in which ranks differ.
#include "parallel/journal.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "parallel/communicator.h"

namespace moetrain::parallel {
namespace {

const char* name_of(Phase phase) {
  constexpr const char* kNames[] = {"start", "load", "forward", "backward", "step", "evaluate", "save", "exit"};
  return kNames[std::size_t(phase)];
}
const char* name_of(Op op) {
  constexpr const char* kNames[] = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "barrier", "split",
                                    "start of MPI", "end of MPI"};
  return kNames[std::size_t(op)];
}

std::uint64_t hash_of(const std::array<char, 20>& name) {
  std::uint64_t hash = 0;
  for (const char c : name) hash = mixed(hash, std::uint8_t(c));
  return hash;
}

// What ranks of different groups share that are at the same point of the program.
std::uint64_t kind_of(const Call& c) {
  std::uint64_t hash = hash_of(c.name);
  for (const auto value : {std::uint64_t(c.op), std::uint64_t(c.dtype), std::uint64_t(c.place.phase), std::uint64_t(std::int64_t(c.place.layer)),
                           std::uint64_t(c.ranks)})
    hash = mixed(hash, value);
  return hash;
}
std::uint64_t hash_of(const Call& c) {
  std::uint64_t hash = kind_of(c);
  for (const auto value : {c.group, c.nth, std::uint64_t(c.count), c.pieces}) hash = mixed(hash, value);
  return hash;
}

struct Made {
  int rank;
  const Call* call;
  std::uint64_t hash;
};

// The rank that differs from most; where none is most, from the lowest.
std::optional<std::pair<Made, Made>> odd_one_out(const std::vector<Made>& made) {
  std::map<std::uint64_t, int> votes;
  for (const Made& m : made) ++votes[m.hash];
  if (votes.size() < 2) return {};
  const Made* norm = &made.front();
  for (const Made& m : made)
    if (votes[m.hash] > votes[norm->hash]) norm = &m;
  const auto odd = std::find_if(made.begin(), made.end(), [&](const Made& m) { return m.hash != norm->hash; });
  return std::pair(*odd, *norm);
}

}  // namespace

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {  // the finisher of splitmix64
  hash = (hash ^ value) + 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

std::string text_of(Place place) {
  return std::string(name_of(place.phase)) + (place.layer >= 0 ? ", layer " + std::to_string(place.layer) : "");
}

std::string text_of(const Call& c) {
  if (c.op == Op::start || c.op == Op::end) return name_of(c.op);
  std::string text = "collective " + std::to_string(c.seq) + ", " + name_of(c.op);
  if (c.count > 0) text += " of " + std::to_string(c.count) + (c.dtype == DType::none ? " bytes" : std::string(" ") + moetrain::name_of(c.dtype));
  return text + " over " + c.name.data() + " (" + std::to_string(c.ranks) + " ranks) in " + text_of(c.place);
}

Group group_of(const char* name, std::uint64_t id, int rank, int ranks) {
  Group group{.rank = rank, .ranks = ranks, .id = id};
  std::strncpy(group.name.data(), name, group.name.size() - 1);
  return group;
}

void Journal::at(Place place) {
  const std::lock_guard lock(mutex_);
  state_.place = place;
}

Call Journal::note(Group& group, Op op, std::int64_t count, DType dtype, std::uint64_t pieces) {
  const std::lock_guard lock(mutex_);
  noted_ = {.seq = noted_.seq + 1,
            .group = group.id,
            .nth = ++group.calls,
            .count = count,
            .pieces = pieces,
            .name = group.name,
            .ranks = group.ranks,
            .place = state_.place,
            .op = op,
            .dtype = dtype};
  state_.calls = noted_.seq;
  state_.recent[noted_.seq % kRecent] = noted_;
  if (!state_.waiting) state_.last = noted_;
  // One rank of the group stands against all others.
  balance_ += hash_of(noted_) * (group.rank == 0 ? std::uint64_t(group.ranks - 1) : ~std::uint64_t(0));
  return noted_;
}

Journal::State Journal::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

std::uint64_t Journal::balance() const {
  const std::lock_guard lock(mutex_);
  return balance_;
}

Journal::Wait::Wait(Journal* journal, const Call& what) : journal_(journal) {
  if (!journal_) return;
  const std::lock_guard lock(journal_->mutex_);
  journal_->state_.last = what;
  journal_->state_.waiting = true;
  ++journal_->state_.waits;
}

Journal::Wait::~Wait() {
  if (!journal_) return;
  const std::lock_guard lock(journal_->mutex_);
  journal_->state_.last = journal_->noted_;
  journal_->state_.waiting = false;
}

// Every rank makes the same calls in the same order, each in its groups: the nth calls of all are of one kind. Within a group the
// nth calls are of one size too.
std::optional<Difference> first_difference(std::span<const std::array<Call, Journal::kRecent>* const> recent) {
  std::map<std::uint64_t, std::vector<Made>> of_all;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<Made>> of_groups;
  for (std::size_t r = 0; r < recent.size(); ++r) {
    if (!recent[r]) continue;
    for (const Call& c : *recent[r]) {
      if (c.seq == 0) continue;
      of_all[c.seq].push_back({int(r), &c, kind_of(c)});
      of_groups[{c.group, c.nth}].push_back({int(r), &c, hash_of(c)});
    }
  }
  std::optional<std::pair<Made, Made>> first;
  for (const auto& [seq, made] : of_all)
    if ((first = odd_one_out(made))) break;
  for (const auto& [nth, made] : of_groups)
    if (const auto odd = odd_one_out(made); odd && (!first || odd->second.call->seq < first->second.call->seq)) first = odd;
  if (!first) return {};
  const auto& [odd, norm] = *first;
  return Difference{odd.rank, "rank " + std::to_string(odd.rank) + " differs from the others: it is in " + text_of(*odd.call) +
                                  "; the others are in " + text_of(*norm.call)};
}

Difference find_difference(Communicator& everyone) {
  using Recent = std::array<Call, Journal::kRecent>;
  const Recent mine = everyone.journal()->state().recent;
  std::vector<Recent> all(std::size_t(everyone.size()));
  const Communicator::Gather piece{mine.data(), all.data(), sizeof mine};
  everyone.all_gather({&piece, 1});
  std::vector<const Recent*> recent;
  for (const Recent& one : all) recent.push_back(&one);
  return first_difference(recent).value_or(
      Difference{0, "the ranks' collectives differ, before the last " + std::to_string(Journal::kRecent) + " of each"});
}

}  // namespace moetrain::parallel
