// together.h -- work that may fail on one rank alone, made to fail on all: no rank is left waiting in a collective.
#pragma once
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "parallel/communicator.h"

namespace moetrain::core {

// The same failure on every rank, so that one of them reports it and all of them leave in order.
class AgreedError : public Error {
 public:
  AgreedError(int rank, const std::string& what, ExitCode code) : Error(what, code), rank_(rank) {}
  int rank() const { return rank_; }  // that failed first, in rank order

 private:
  int rank_;
};

// Throws the AgreedError of the lowest rank that gives one; collective.
void agree(parallel::Communicator& control, const Error* mine);

// What a body fails with, in words; nothing where it does not fail.
template <class Body>
std::optional<Error> failure_of(Body&& body) {
  try {
    std::forward<Body>(body)();
  } catch (const AgreedError&) {
    throw;  // from a collective inside: every rank is on this way already
  } catch (const Error& e) {
    return e;
  } catch (const std::bad_alloc&) {
    return Error("out of host memory");
  } catch (const std::exception& e) {
    return Error(e.what());
  }
  return {};
}

template <class Body>
void together(parallel::Communicator& control, Body&& body) {
  const std::optional<Error> mine = failure_of(std::forward<Body>(body));
  agree(control, mine ? &*mine : nullptr);
}

}  // namespace moetrain::core
