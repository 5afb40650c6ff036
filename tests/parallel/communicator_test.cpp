// communicator_test.cpp -- the groups that need no peers: one rank copies, a dry group only counts.
#include "parallel/communicator.h"

#include "parallel/network.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"

using namespace moetrain;
using namespace moetrain::parallel;

TEST_CASE("one rank receives what it sends and counts no traffic", "[parallel][cpu]") {
  const auto group = solo();
  REQUIRE(group->size() == 1);
  const std::vector<double> sent{1, 2, 3};
  std::vector<double> gathered(3), summed(3), exchanged(3);
  const Communicator::Gather gather{sent.data(), gathered.data(), 24};
  const Communicator::Scatter scatter{sent.data(), summed.data(), 3, DType::f64};
  const std::int64_t bytes[] = {24};
  group->all_gather({&gather, 1});
  group->reduce_scatter({&scatter, 1});
  group->all_to_all(sent.data(), bytes, exchanged.data(), bytes);
  CHECK(gathered == sent);
  CHECK(summed == sent);
  CHECK(exchanged == sent);
  std::vector<double> reduced = sent;
  group->all_reduce(Tensor(reduced.data(), DType::f64, {3}), Reduction::max);
  group->broadcast(reduced.data(), 24, 0);
  group->barrier();
  CHECK(reduced == sent);
  CHECK(group->traffic().bytes_gathered == 0);
  CHECK(group->traffic().bytes_exchanged == 0);
  CHECK(group->subgroup(std::vector<int>{0})->size() == 1);
}

TEST_CASE("a dry group counts the bytes of every collective and follows no pointer", "[parallel][cpu]") {
  const auto group = dry(2, 4);
  const Communicator::Gather gathers[] = {{nullptr, nullptr, 100}, {nullptr, nullptr, 0}};
  group->all_gather(gathers);
  CHECK(group->traffic().bytes_gathered == 300);
  const Communicator::Scatter scatter{nullptr, nullptr, 10, DType::f64};
  group->reduce_scatter({&scatter, 1});
  CHECK(group->traffic().bytes_gathered == 300 + 240);
  group->all_reduce(Tensor(nullptr, DType::f32, {5}), Reduction::sum);  // shares of 2, out and back
  CHECK(group->traffic().bytes_gathered == 300 + 240 + 48);
  const std::int64_t send[] = {1, 2, 1000, 4}, receive[] = {0, 0, 1000, 9};
  group->all_to_all(nullptr, send, nullptr, receive);
  CHECK(group->traffic().bytes_exchanged == 7);
}

TEST_CASE("what begins apart from its end counts when it begins, and calls of one piece wait for nothing under way", "[parallel][cpu]") {
  const auto group = dry(0, 2);
  const Communicator::Gather gather{nullptr, nullptr, 100};
  const Communicator::Scatter scatter{nullptr, nullptr, 10, DType::f64};
  const Communicator::Outgoing out[] = {{nullptr, 0}, {nullptr, 5}};
  const Communicator::Incoming in[] = {{nullptr, 0}, {nullptr, 7}};
  CHECK_THROWS_AS(group->end(), Error);
  group->begin_all_gather({&gather, 1});
  group->begin_reduce_scatter({&scatter, 1});
  group->begin_all_to_all(out, in);
  CHECK(group->traffic().bytes_gathered == 180);
  CHECK(group->traffic().bytes_exchanged == 5);
  CHECK_THROWS_AS(group->all_gather({&gather, 1}), Error);
  CHECK_THROWS_AS(group->all_reduce(Tensor(nullptr, DType::f32, {1}), Reduction::sum), Error);
  CHECK_THROWS_AS(group->broadcast(nullptr, 1, 0), Error);
  CHECK_THROWS_AS(group->barrier(), Error);
  for (int i = 0; i < 3; ++i) group->end();
  CHECK_THROWS_AS(group->end(), Error);
  group->barrier();
}

TEST_CASE("messages of a dry group take the time of the links between its ranks", "[parallel][cpu]") {
  Timeline clock(true, 0);
  const Network network{.near = {100, 1}, .far = {10, 3}, .ranks_a_host = 2, .timeline = &clock};
  const auto world = dry(2, 8, &network);  // hosts {0 1} {2 3} {4 5} {6 7}
  const auto near = world->subgroup(std::vector<int>{2, 3}), alone = world->subgroup(std::vector<int>{2});
  const auto control = world->subgroup(std::vector<int>{0, 1, 2, 3}, Communicator::Lane::control);
  const auto took = [&](auto&& call) {
    const double before = clock.now();
    call();
    return clock.now() - before;
  };
  const Communicator::Gather gather{nullptr, nullptr, 200};
  CHECK(took([&] { near->all_gather({&gather, 1}); }) == 200 / 100.0 + 1);
  CHECK(near->traffic().exposed_seconds[std::size_t(Purpose::gather)] == 3);
  CHECK(took([&] { world->all_gather({&gather, 1}); }) == 6 * 200 / (2 * 10.0) + 3 * 3);  // of six ranks elsewhere, by two ways in
  const Communicator::Scatter scatter{nullptr, nullptr, 50, DType::f32};
  CHECK(took([&] { world->reduce_scatter({&scatter, 1}); }) == 60 + 9);
  CHECK(took([&] { world->all_reduce(Tensor(nullptr, DType::f32, {400}), Reduction::sum); }) == 2 * (60 + 9));
  CHECK(took([&] { alone->all_gather({&gather, 1}); }) == 0);
  CHECK(took([&] { control->all_reduce(Tensor(nullptr, DType::f32, {400}), Reduction::sum); }) == 0);
  const auto exchange = world->subgroup(std::vector<int>{0, 2, 3}, Communicator::Lane::exchange);  // 0 is elsewhere
  const Communicator::Outgoing out[] = {{nullptr, 40}, {nullptr, 9}, {nullptr, 700}};
  const Communicator::Incoming in[] = {{nullptr, 20}, {nullptr, 9}, {nullptr, 800}};
  CHECK(took([&] {
          exchange->begin_all_to_all(out, in);
          exchange->end();
        }) == 8 + 3);  // 800 at 100 beside 40 at 10
}

TEST_CASE("the subgroup of a dry group knows this rank's place among its members", "[parallel][cpu]") {
  const auto group = dry(2, 4)->subgroup(std::vector<int>{3, 2});
  CHECK(group->rank() == 1);
  CHECK(group->size() == 2);
  CHECK_THROWS_AS(dry(2, 4)->subgroup(std::vector<int>{0, 1}), Error);
}

TEST_CASE("collectives refuse what no rank could carry out", "[parallel][cpu]") {
  const auto group = dry(0, 2);
  const std::int64_t one[] = {1}, two[] = {1, 1}, other_own[] = {2, 1}, negative[] = {1, -1};
  CHECK_THROWS_AS(group->all_to_all(nullptr, one, nullptr, two), Error);
  CHECK_THROWS_AS(group->all_to_all(nullptr, two, nullptr, other_own), Error);
  CHECK_THROWS_AS(group->all_to_all(nullptr, negative, nullptr, negative), Error);
  CHECK_THROWS_AS(group->broadcast(nullptr, 1, 2), Error);
  CHECK_THROWS_AS(group->all_reduce(Tensor(nullptr, DType::bf16, {1}), Reduction::sum), Error);
  const Communicator::Scatter scatter{nullptr, nullptr, 1, DType::bf16};
  CHECK_THROWS_AS(group->reduce_scatter({&scatter, 1}), Error);
  CHECK_THROWS_AS(dry(2, 2), Error);
}
