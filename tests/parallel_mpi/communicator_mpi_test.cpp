// communicator_mpi_test.cpp -- every collective against its definition, with data that says where it comes from.
#include <mpi.h>

#include <cstring>
#include <limits>
#include <numeric>

#include "ops/random.h"
#include "parallel/communicator.h"
#include "parallel/mpi_check.h"
#include "parallel/mpi_session.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"

using namespace moetrain;
using namespace moetrain::parallel;

namespace {

// One round a call, and rounds so short that every call needs many.
constexpr std::int64_t kRounds[] = {std::int64_t(64) << 20, 64, 8};

// A whole number that no other (collective, rank, place) has.
double origin(int piece, int rank, std::int64_t i) { return 100000.0 * piece + 1000.0 * rank + double(i) + 1; }

int communicators_freed = 0;

}  // namespace

extern "C" int MPI_Comm_free(MPI_Comm* comm) {  // in place of MPI's own, so that its calls can be counted
  ++communicators_freed;
  return PMPI_Comm_free(comm);
}

TEST_CASE("a communicator is freed at its end, but not by a rank that leaves with an exception while others wait elsewhere", "[parallel][mpi]") {
  const auto world = mpi_world();
  auto group = mpi_world();
  int before = communicators_freed;
  group.reset();
  CHECK(communicators_freed == before + 1);
  group = mpi_world();
  before = communicators_freed;
  if (world->rank() == 1) {
    CHECK_THROWS_AS([leaving = std::move(group)]() mutable {
      const auto dying = std::move(leaving);
      throw Error("alone");
    }(), Error);
    CHECK(communicators_freed == before);
  }
  world->barrier();  // would not be reached by rank 1 if its way out waited for the others
}

TEST_CASE("all_gather of a batch brings every rank's piece to its place, empty ones too", "[parallel][mpi]") {
  for (const auto round_bytes : kRounds) {
    const auto world = mpi_world(round_bytes);
    const int n = world->size(), me = world->rank();
    const std::vector<std::int64_t> counts{5, 0, 1, 33};
    std::vector<std::vector<double>> send, receive;
    std::vector<std::vector<std::uint8_t>> odd_send(1, std::vector<std::uint8_t>(13)),
        odd_receive(1, std::vector<std::uint8_t>(std::size_t(13 * n), 0xff));
    for (std::size_t i = 0; i < 13; ++i) odd_send[0][i] = std::uint8_t(me * 16 + int(i));
    std::vector<Communicator::Gather> pieces;
    for (std::size_t p = 0; p < counts.size(); ++p) {
      send.emplace_back();
      for (std::int64_t i = 0; i < counts[p]; ++i) send.back().push_back(origin(int(p), me, i));
      receive.emplace_back(std::size_t(counts[p] * n), -1);
    }
    for (std::size_t p = 0; p < counts.size(); ++p) {
      pieces.push_back({send[p].data(), receive[p].data(), counts[p] * 8});
      if (p == 1) pieces.push_back({odd_send[0].data(), odd_receive[0].data(), 13});
    }
    world->all_gather(pieces);
    for (std::size_t p = 0; p < counts.size(); ++p) {
      std::vector<double> want;
      for (int r = 0; r < n; ++r)
        for (std::int64_t i = 0; i < counts[p]; ++i) want.push_back(origin(int(p), r, i));
      CHECK(receive[p] == want);
    }
    for (int r = 0; r < n; ++r)
      for (int i = 0; i < 13; ++i) CHECK(int(odd_receive[0][std::size_t(r * 13 + i)]) == r * 16 + i);
    CHECK(world->traffic().bytes_gathered == (n - 1) * (39 * 8 + 13));
  }
}

TEST_CASE("all_gather may send from its own place in what it receives", "[parallel][mpi]") {
  const auto world = mpi_world(64);
  const int n = world->size(), me = world->rank();
  std::vector<double> all(std::size_t(10 * n), -1), want;
  for (int i = 0; i < 10; ++i) all[std::size_t(me * 10 + i)] = origin(0, me, i);
  const Communicator::Gather piece{all.data() + me * 10, all.data(), 80};
  world->all_gather({&piece, 1});
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < 10; ++i) want.push_back(origin(0, r, i));
  CHECK(all == want);
}

TEST_CASE("reduce_scatter of a batch of mixed types leaves each rank the sum of its part", "[parallel][mpi]") {
  for (const auto round_bytes : kRounds) {
    const auto world = mpi_world(round_bytes);
    const int n = world->size(), me = world->rank();
    constexpr std::int64_t kFloats = 7, kDoubles = 9, kInts = 3;
    std::vector<float> f, f_sum(kFloats, -1);
    std::vector<double> d, d_sum(kDoubles, -1);
    std::vector<std::int64_t> k, k_sum(kInts, -1);
    for (std::int64_t i = 0; i < kFloats * n; ++i) f.push_back(float(origin(0, me, i)));
    for (std::int64_t i = 0; i < kDoubles * n; ++i) d.push_back(origin(1, me, i));
    for (std::int64_t i = 0; i < kInts * n; ++i) k.push_back((std::int64_t(1) << 60) / n + std::int64_t(origin(2, me, i)));
    const Communicator::Scatter pieces[] = {{f.data(), f_sum.data(), kFloats, DType::f32},
                                            {nullptr, nullptr, 0, DType::f32},
                                            {d.data(), d_sum.data(), kDoubles, DType::f64},
                                            {k.data(), k_sum.data(), kInts, DType::i64}};
    world->reduce_scatter(pieces);
    const auto sum = [&](int piece, std::int64_t i) {
      double s = 0;
      for (int r = 0; r < n; ++r) s += origin(piece, r, i);
      return s;
    };
    for (std::int64_t i = 0; i < kFloats; ++i) CHECK(double(f_sum[std::size_t(i)]) == sum(0, me * kFloats + i));
    for (std::int64_t i = 0; i < kDoubles; ++i) CHECK(d_sum[std::size_t(i)] == sum(1, me * kDoubles + i));
    for (std::int64_t i = 0; i < kInts; ++i)
      CHECK(k_sum[std::size_t(i)] == (std::int64_t(1) << 60) / n * n + std::int64_t(sum(2, me * kInts + i)));
    CHECK(world->traffic().bytes_gathered == (n - 1) * (kFloats * 4 + kDoubles * 8 + kInts * 8));
  }
}

TEST_CASE("all_reduce gives the sum, the largest and the smallest of every element in every type", "[parallel][mpi]") {
  for (const auto round_bytes : kRounds)
    for (const DType dtype : {DType::f32, DType::f64, DType::i32, DType::i64})
      for (const std::int64_t count : {0, 1, 3, 50, round_bytes > 64 ? 5001 : 203}) {
        const auto world = mpi_world(round_bytes);
        const int n = world->size(), me = world->rank();
        CAPTURE(round_bytes, name_of(dtype), count);
        const auto value = [&](int rank, std::int64_t i) { return ((i + rank) % 2 ? -1.0 : 1.0) * double(10 * i + rank); };
        std::vector<std::byte> storage(std::size_t(count * 8));
        const Tensor t(storage.data(), dtype, {count});
        for (const Reduction reduction : {Reduction::sum, Reduction::max, Reduction::min}) {
          std::vector<double> want;
          for (std::int64_t i = 0; i < count; ++i) {
            double w = value(0, i);
            for (int r = 1; r < n; ++r) {
              const double x = value(r, i);
              w = reduction == Reduction::sum ? w + x : reduction == Reduction::max ? std::max(w, x) : std::min(w, x);
            }
            want.push_back(w);
            const double mine = value(me, i);
            if (dtype == DType::f32) t.as<float>()[i] = float(mine);
            if (dtype == DType::f64) t.as<double>()[i] = mine;
            if (dtype == DType::i32) t.as<std::int32_t>()[i] = std::int32_t(mine);
            if (dtype == DType::i64) t.as<std::int64_t>()[i] = std::int64_t(mine);
          }
          world->all_reduce(t, reduction);
          REQUIRE(test::values_of(t) == want);
        }
      }
}

TEST_CASE("all_reduce of rounding sums gives the same bits on every rank and at every repetition", "[parallel][mpi]") {
  for (const std::int64_t count : {17, 20011}) {
    const auto world = mpi_world();
    const int n = world->size(), me = world->rank();
    std::vector<float> first;
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<float> x;
      for (std::int64_t i = 0; i < count; ++i)
        x.push_back(float(ops::normal(7, std::uint64_t(me), std::uint64_t(i)) * (me == 1 ? 1e6 : 1)));
      world->all_reduce(Tensor(x.data(), DType::f32, {count}), Reduction::sum);
      std::vector<float> all(std::size_t(count * n));
      const Communicator::Gather piece{x.data(), all.data(), count * 4};
      world->all_gather({&piece, 1});
      for (int r = 0; r < n; ++r) CHECK(std::memcmp(all.data() + r * count, x.data(), std::size_t(count * 4)) == 0);
      if (repeat == 0) first = x;
      CHECK(std::memcmp(first.data(), x.data(), std::size_t(count * 4)) == 0);
    }
  }
}

TEST_CASE("all_reduce never loses a NaN of one rank", "[parallel][mpi]") {
  const auto world = mpi_world();
  for (const Reduction reduction : {Reduction::sum, Reduction::max, Reduction::min})
    for (int poisoned = 0; poisoned < world->size(); ++poisoned) {
      double x = world->rank() == poisoned ? std::numeric_limits<double>::quiet_NaN() : 1.0;
      world->all_reduce(Tensor(&x, DType::f64, {1}), reduction);
      CHECK(std::isnan(x));
    }
}

TEST_CASE("all_to_all takes each part to its rank, whatever the sizes", "[parallel][mpi]") {
  for (const auto round_bytes : kRounds)
    for (const int kind : {0, 1, 2, 3}) {
      const auto world = mpi_world(round_bytes);
      const int n = world->size(), me = world->rank();
      CAPTURE(round_bytes, kind);
      // doubles from rank s to rank r: uneven with holes; all to rank 1; nothing; one large
      const auto count = [&](int s, int r) -> std::int64_t {
        if (kind == 0) return (s * 7 + r * 3) % 5;
        if (kind == 1) return r == 1 ? 11 + s : 0;
        if (kind == 2) return 0;
        return s == 2 && r == 0 ? 1000 : 1;
      };
      std::vector<double> send, want;
      std::vector<std::int64_t> send_bytes, receive_bytes;
      std::int64_t away = 0;
      for (int r = 0; r < n; ++r) {
        send_bytes.push_back(count(me, r) * 8);
        receive_bytes.push_back(count(r, me) * 8);
        if (r != me) away += send_bytes.back();
        for (std::int64_t i = 0; i < count(me, r); ++i) send.push_back(origin(r, me, i));
        for (std::int64_t i = 0; i < count(r, me); ++i) want.push_back(origin(me, r, i));
      }
      std::vector<double> receive(want.size(), -1);
      world->all_to_all(send.data(), send_bytes, receive.data(), receive_bytes);
      CHECK(receive == want);
      CHECK(world->traffic().bytes_exchanged == away);
    }
}

TEST_CASE("broadcast copies the root's bytes to every rank, for every root", "[parallel][mpi]") {
  for (const auto round_bytes : kRounds) {
    const auto world = mpi_world(round_bytes);
    for (int root = 0; root < world->size(); ++root)
      for (const std::int64_t count : {0, 1, 100}) {
        std::vector<double> x, want;
        for (std::int64_t i = 0; i < count; ++i) {
          x.push_back(origin(0, world->rank(), i));
          want.push_back(origin(0, root, i));
        }
        world->broadcast(x.data(), count * 8, root);
        CHECK(x == want);
      }
    world->barrier();
  }
}

TEST_CASE("subgroups keep the order of their members and do not hear each other", "[parallel][mpi]") {
  const auto world = mpi_world();
  const int n = world->size(), me = world->rank();
  std::vector<int> members;  // even or odd ranks, last first
  for (int r = n - 1; r >= 0; --r)
    if (r % 2 == me % 2) members.push_back(r);
  const auto half = world->subgroup(members);
  REQUIRE(half->size() == int(members.size()));
  CHECK(members[std::size_t(half->rank())] == me);
  std::vector<double> all(members.size(), -1), want(members.begin(), members.end());
  const double mine = me;
  const Communicator::Gather piece{&mine, all.data(), 8};
  half->all_gather({&piece, 1});
  CHECK(all == want);
  CHECK(world->traffic().bytes_gathered == 0);
  CHECK(half->subgroup(std::vector<int>{half->rank()})->size() == 1);
}

TEST_CASE("ranks that do not agree on the members of a group are told so", "[parallel][mpi]") {
  const auto world = mpi_world();
  const int me = world->rank();
  if (me == 0)
    CHECK_THROWS_AS(world->subgroup(std::vector<int>{0, 1}), Error);  // rank 1 does not come
  else
    CHECK(world->subgroup(std::vector<int>{me})->size() == 1);
  CHECK_THROWS_AS(world->subgroup(std::vector<int>{world->size()}), Error);
}

TEST_CASE("a status of MPI becomes an Error with its place and the exit code of its kind", "[parallel][mpi]") {
  mpi_ok(0);
  try {
    mpi_ok(1);
    CHECK(false);
  } catch (const Error& e) {
    CHECK(std::string(e.what()).find("communicator_mpi_test.cpp:") != std::string::npos);
    CHECK(e.code() == ExitCode::run_failed);
  }
}

TEST_CASE("MPI names its version", "[parallel][mpi]") { CHECK(mpi_version().size() > 4); }

TEST_CASE("a gather, a sum and exchanges travel at once on one group and on two, and each ends as alone", "[parallel][mpi]") {
  const auto world = mpi_world();
  const int n = world->size(), me = world->rank();
  std::vector<int> all(std::size_t(n), 0);
  std::iota(all.begin(), all.end(), 0);
  const auto other = world->subgroup(all);
  std::vector<double> mine{double(me), double(10 * me)}, gathered(std::size_t(2 * n));
  std::vector<double> parts(std::size_t(n), double(me + 1)), sum(1);
  std::vector<std::vector<double>> sent, came;
  const Communicator::Gather gather{mine.data(), gathered.data(), 16};
  const Communicator::Scatter scatter{parts.data(), sum.data(), 1, DType::f64};
  for (int round = 0; round < 3; ++round) {
    sent.emplace_back();
    came.emplace_back(std::size_t(n));
    for (int r = 0; r < n; ++r) sent.back().push_back(1000 * round + 10 * me + r);
  }
  const auto begin_exchange = [&](Communicator& group, std::size_t round) {
    std::vector<Communicator::Outgoing> out;
    std::vector<Communicator::Incoming> in;
    for (std::size_t r = 0; r < std::size_t(n); ++r) {
      out.push_back({&sent[round][r], 8});
      in.push_back({&came[round][r], 8});
    }
    group.begin_all_to_all(out, in);
  };
  begin_exchange(*world, 0);
  other->begin_all_gather({&gather, 1});
  begin_exchange(*world, 1);
  world->begin_reduce_scatter({&scatter, 1});
  begin_exchange(*other, 2);
  for (int i = 0; i < 3; ++i) world->end();
  for (int i = 0; i < 2; ++i) other->end();
  CHECK(sum[0] == n * (n + 1) / 2);
  for (int r = 0; r < n; ++r) {
    CHECK(gathered[std::size_t(2 * r + 1)] == 10 * r);
    for (std::size_t round = 0; round < 3; ++round) CHECK(came[round][std::size_t(r)] == 1000 * double(round) + 10 * r + me);
  }
}
