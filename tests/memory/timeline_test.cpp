// timeline_test.cpp -- work and messages on a clock, each end counted by hand.
#include "memory/timeline.h"

#include "tests/support/catch.h"

using namespace moetrain;
using Lane = Timeline::Lane;

TEST_CASE("a message that is there before it is wanted costs nothing, a late one what is left of it", "[memory][cpu]") {
  Timeline t(/*beside=*/true, /*drag=*/0);
  t.work(2);
  const auto first = t.send(Lane::sharding, 3);  // 2 to 5
  t.work(4);                                     // 2 to 6
  CHECK(t.wait(first) == 0);
  const auto second = t.send(Lane::sharding, 3), third = t.send(Lane::sharding, 1);  // 6 to 9, 9 to 10: one lane
  const auto other = t.send(Lane::exchange, 2);                                      // 6 to 8 beside them
  t.work(1);
  CHECK(t.wait(other) == 1);   // at 8
  CHECK(t.wait(third) == 2);   // at 10
  CHECK(t.wait(second) == 0);  // was before
  CHECK(t.now() == 10);
  CHECK(t.dragged() == 0);
}

TEST_CASE("work beside a message between ranks is slower by the drag, beside one to the host it is not", "[memory][cpu]") {
  Timeline t(true, 0.5);
  const auto message = t.send(Lane::exchange, 3);
  t.work(1);  // 1.5
  CHECK(t.now() == 1.5);
  t.work(3);  // 1 of it in the 1.5 that the message has left, 2 after it
  CHECK(t.now() == 5);
  CHECK(t.dragged() == 1);
  CHECK(t.wait(message) == 0);
  t.send(Lane::to_host, 10);
  t.work(1);
  CHECK(t.now() == 6);
}

TEST_CASE("where nothing travels beside work every message is waited for whole", "[memory][cpu]") {
  Timeline t(false, 0.5);
  const auto message = t.send(Lane::sharding, 3);
  t.work(10);
  CHECK(t.wait(message) == 3);
  CHECK(t.now() == 13);
}
