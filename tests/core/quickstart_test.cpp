// quickstart_test.cpp -- does configs/quickstart.yaml show what it promises, and is it the mixing over positions that learns?
#include <cmath>
#include <filesystem>
#include <map>

#include "core/trainer.h"
#include "io/yaml.h"
#include "tests/support/catch.h"
#include "tests/support/tiny.h"

using namespace moetrain;

namespace {

core::Config quickstart() {
  std::vector<core::Fault> faults;
  const auto job = io::read_yaml(std::string(MOETRAIN_SOURCE_DIR) + "/configs/quickstart.yaml");
  core::Config c = core::read_config(job, {}, MOETRAIN_SOURCE_DIR "/configs", faults);
  for (const auto& f : faults) FAIL(f.key << ": " << f.text);
  // One rank with the same global batch: the layouts agree (layouts_mpi_test.cpp).
  c.training.micro_batch_size = c.sequences_per_step();
  c.parallel = {};
  return c;
}

struct Outcome {
  double first = 0, last_ten = 0, held_out = 0, order1 = 0;
};

// H(next byte | byte) of one epoch in nats: what a model of byte pairs can reach at best.
double order1_entropy(const io::BatchSource& source) {
  std::map<std::pair<int, int>, double> pairs;
  std::map<int, double> firsts;
  const io::Batch all = source.read(0, source.windows());
  for (std::size_t t = 0; t < all.tokens.size(); ++t)
    if (all.labels[t] >= 0) ++pairs[{all.tokens[t], all.labels[t]}], ++firsts[all.tokens[t]];
  double sum = 0;
  for (const auto& [pair, n] : pairs) sum -= n * std::log(n / firsts[pair.first]);
  return sum / double(all.label_count());
}

// mixing false: the output projections of KDA and attention are held at zero, so that no token sees another.
Outcome run(const core::Config& c, bool mixing) {
  const io::DataOptions data{.paths = c.data.train,
                             .format = c.data.format,
                             .sequence_length = c.data.sequence_length,
                             .packing = c.data.packing,
                             .shuffle = c.data.shuffle,
                             .seed = c.run.seed,
                             .exclude = c.data.exclude,
                             .vocab_size = c.model.vocab_size};
  io::DataOptions held_out = data;
  held_out.paths = c.data.eval;
  held_out.exclude.clear();
  const io::BatchSource train(data), eval(held_out);
  core::Trainer t(c, parallel::solo(), Device::cpu);
  t.initialize();
  auto silence = [&] {
    for (int i = 0; i < t.table().size(); ++i)
      if (t.table()[i].name.ends_with("self_attn.o_proj.weight")) {
        const Tensor w = t.params().stored(i, t.params().update_rows(i));
        fill(Device::cpu, w.data, 0, w.bytes());
      }
  };
  Outcome o;
  o.order1 = order1_entropy(train);
  for (std::int64_t s = 1; s <= c.training.steps; ++s) {
    if (!mixing) silence();
    const auto r = t.step(t.next_batches(train));
    if (s == 1) o.first = r.loss;
    if (s > c.training.steps - 10) o.last_ten += r.loss / 10;
  }
  if (!mixing) silence();
  o.held_out = *t.evaluate(t.evaluation_batches(eval, 2));
  return o;
}

}  // namespace

TEST_CASE("the quickstart starts at ln V, ends 0.3 nats under the order-1 entropy, and without mixing 0.1 higher at least",
          "[slow]") {
  const auto c = quickstart();
  if (!std::filesystem::exists(c.data.train.front())) return;  // another distribution
  const Outcome whole = run(c, true), silent = run(c, false);
  WARN("quickstart: first " << whole.first << ", last ten " << whole.last_ten << ", held out " << whole.held_out
                            << "; without mixing " << silent.last_ten << ", held out " << silent.held_out << "; order-1 entropy "
                            << whole.order1);
  CHECK(std::abs(whole.first - std::log(257.0)) < 0.1);
  CHECK(whole.last_ten < whole.order1 - 0.3);
  CHECK(silent.last_ten > whole.last_ten + 0.1);
  CHECK(whole.held_out < 2.6);
}
