// lost_rank.cpp -- a program of several ranks of which rank 1 goes astray in a way that its argument names: lost_rank WAY SECONDS.
// lost_rank_test.py says how it has to end.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "parallel/communicator.h"
#include "parallel/mpi_session.h"
#include "parallel/watchdog.h"

using namespace moetrain;
using namespace moetrain::parallel;

int main(int argc, char** argv) {
  const std::string way = argv[1];
  Watchdog dog(*launched(), std::atof(argv[2]), [](ExitCode code, const std::string& cause, int rank) {
    std::fprintf(stderr, "end %d of rank %d: %s\n", int(code), rank, cause.c_str());
  });
  MpiSession mpi(argc, argv, dog.journal());
  try {
    const auto world = mpi_world(kRoundBytes, dog.journal());
    const int n = world->size(), me = world->rank();
    std::vector<int> members;
    for (int r = me % 2; r < n; r += 2) members.push_back(r);
    const auto half = world->subgroup(members, {}, "half");
    const auto sum = [&](Communicator& group, std::int64_t count) {
      std::vector<double> values(std::size_t(count), 1);
      group.all_reduce(Tensor(values.data(), DType::f64, {count}), Reduction::sum);
    };
    for (int layer = 0; layer < 6; ++layer) {
      const bool astray = me == 1 && layer == 3;
      world->enter(Phase::forward, layer);
      if (!astray || way != "skip") sum(*world, 3);
      if (!astray || way != "skip_half") sum(*half, 5);
      if (astray && way == "count") sum(*world, 7000);
      else sum(*world, 4000);
    }
    world->enter(Phase::step);
    std::uint64_t balances = 0, mine = dog.journal()->balance();
    std::vector<std::uint64_t> all(std::size_t(n), 0);
    const Communicator::Gather piece{&mine, all.data(), sizeof mine};
    world->all_gather({&piece, 1});
    for (const auto balance : all) balances += balance;
    if (me == 0) std::printf("balances %s\n", balances == 0 ? "agree" : "differ");
    if (balances != 0) dog.lost(find_difference(*world).text);
  } catch (const Error& e) {
    dog.lost(e.what());
  }
  return 0;
}
