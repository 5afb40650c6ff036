// golden_test.cpp -- logits, gradients and ten losses against independent f64 programs (tests/golden/README.md).
#include "core/import.h"
#include "core/trainer.h"
#include "io/hdf5_file.h"
#include "io/yaml.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

std::string golden(const char* name) {
  const std::string here = __FILE__;
  return here.substr(0, here.rfind("tests/core/")) + "tests/golden/" + name;
}

// The model section is the golden file's own config.
core::Config golden_config(const io::Hdf5File& file) {
  io::YamlNode job;
  job.kind = io::YamlNode::map;
  job.entries.emplace_back("model", io::parse_yaml(file.read_text("config"), file.path()));
  std::vector<core::Fault> faults;
  core::Config c = core::read_config(job, {}, ".", faults);
  for (const auto& f : faults)
    if (f.key.starts_with("model")) FAIL(f.key << ": " << f.text);
  c.run.dtype = DType::f64;
  c.training.steps = 10;
  c.training.grad_clip = 1;
  c.optimizer.lr = 1e-2;
  c.optimizer.weight_decay = 0.1;
  c.schedule = {};
  c.schedule.name = core::ScheduleKind::constant;
  c.moe.balance = core::Balance::none;
  return c;
}

std::vector<double> read_all(const io::Hdf5File& file, const std::string& name) {
  const auto info = file.info(name);
  std::vector<double> v(std::size_t(info.shape.count()));
  if (info.dtype == DType::f64) {
    file.read(name, Tensor(v.data(), DType::f64, info.shape));
  } else {
    std::vector<std::byte> raw(v.size() * std::size_t(size_of(info.dtype)));
    file.read(name, Tensor(raw.data(), info.dtype, info.shape));
    v = values_of(ConstTensor(raw.data(), info.dtype, info.shape));
  }
  return v;
}

std::unique_ptr<core::Trainer> make(const io::Hdf5File& file, const core::Config& c) {
  auto t = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true);
  for (int i = 0; i < t->table().size(); ++i) {
    const Tensor w = t->params().stored(i, t->params().update_rows(i));
    file.read("weights/" + t->table()[i].name, w);
  }
  for (const auto& name : file.names("weights")) {
    CAPTURE(name);
    CHECK(t->table().find(name) >= 0);
  }
  t->params().publish();
  return t;
}

io::Batch batch_of(const std::vector<double>& tokens, const std::vector<double>& labels, const std::vector<double>& documents,
                   std::int64_t B) {
  io::Batch b;
  for (const double x : tokens) b.tokens.push_back(std::int32_t(x));
  for (const double x : labels) b.labels.push_back(std::int32_t(x));
  for (const double x : documents) b.documents.push_back(std::int64_t(x));
  for (std::int64_t s = 0; s <= B; ++s) b.sequences.push_back(s * std::int64_t(tokens.size()) / B);
  return b;
}

// loss, logits and gradients within these of the golden ones.
struct Bounds {
  double values = 1e-10, gradients = 1e-9;
};
void check_forward_and_gradients(const io::Hdf5File& file, core::Trainer* t, Bounds bounds = {}) {
  const auto shape = file.info("tokens").shape;
  const io::Batch host = batch_of(read_all(file, "tokens"), read_all(file, "labels"), read_all(file, "documents"), shape[0]);
  std::vector<double> room(std::size_t(shape.count() * t->config().model.vocab_size));
  const Tensor logits(room.data(), t->config().run.dtype, {shape.count(), t->config().model.vocab_size});
  const double loss = *t->evaluate({&host, 1}, logits);
  CHECK(difference(values_of(logits), read_all(file, "logits"), bounds.values) == "");
  CHECK(difference({loss}, read_all(file, file.has("lm_loss") ? "lm_loss" : "loss"), bounds.values) == "");
  const io::Batch one[1] = {host};
  const auto result = t->step(one);
  if (file.has("indexer_loss")) CHECK(difference({result.indexer_loss.value()}, read_all(file, "indexer_loss"), bounds.values) == "");
  if (file.has("expert_counts")) {
    const auto counts = read_all(file, "expert_counts");
    CHECK(std::vector<double>(result.expert_tokens.begin(), result.expert_tokens.end()) == counts);
  }
  int compared = 0;
  for (int i = 0; i < t->table().size(); ++i) {
    const auto& p = t->table()[i];
    if (!p.trainable) continue;
    CAPTURE(p.name);
    const auto want = read_all(file, "gradients/" + p.name);
    CHECK(difference(values_of(t->params().stored_gradient(i, t->params().update_rows(i))), want, bounds.gradients, 1e-15) == "");
    ++compared;
  }
  CHECK(compared > 60);
}

// From the golden file's own weights, in f64.
void check_forward_and_gradients(const char* name) {
  const auto file = io::Hdf5File::open(golden(name));
  core::Config c = golden_config(file);
  c.optimizer.lr = 0;  // gradients are looked at after the step
  check_forward_and_gradients(file, make(file, c).get());
}

// From the folder that the transformers library saved, straight and by way of a checkpoint.
void check_imported(DType dtype, Bounds bounds) {
  const TempFolder folder;
  const std::string saved = golden("kimi_linear_hf"), checkpoint = folder / "imported";
  core::import_folder(*parallel::solo(), saved, checkpoint);
  const auto file = io::Hdf5File::open(golden("kimi_linear.h5"));
  core::Config c = golden_config(file);
  c.optimizer.lr = 0;
  c.run.dtype = dtype;
  for (const std::string& from : {saved, checkpoint}) {
    CAPTURE(from);
    core::Trainer t(c, parallel::solo(), Device::cpu, /*poison=*/true);
    core::initialize_from(t, from);
    check_forward_and_gradients(file, &t, bounds);
  }
}

void check_ten_steps(const char* name, core::Balance balance, const char* losses) {
  const auto file = io::Hdf5File::open(golden(name));
  core::Config c = golden_config(file);
  c.moe.balance = balance;
  auto t = make(file, c);
  const auto tokens = read_all(file, "tokens_steps"), labels = read_all(file, "labels_steps"),
             documents = read_all(file, "documents_steps");
  const auto want = read_all(file, losses), norms = read_all(file, "grad_norm");
  const std::size_t T = tokens.size() / 10, N = documents.size() / 10;
  std::vector<double> got, got_norms;
  for (std::size_t s = 0; s < 10; ++s) {
    auto part = [&](const std::vector<double>& v, std::size_t n) {
      return std::vector<double>(v.begin() + std::ptrdiff_t(s * n), v.begin() + std::ptrdiff_t((s + 1) * n));
    };
    const io::Batch one[1] = {batch_of(part(tokens, T), part(labels, T), part(documents, N), 2)};
    const auto r = t->step(one);
    got.push_back(r.loss);
    got_norms.push_back(r.grad_norm);
  }
  CHECK(difference(got, want, 1e-8) == "");
  if (balance == core::Balance::none) {
    CHECK(difference(got_norms, norms, 1e-7) == "");
    for (const auto& p : file.names("final_weights")) {
      CAPTURE(p);
      const int i = t->table().find(p);
      REQUIRE(i >= 0);
      CHECK(difference(values_of(t->params().stored(i, t->params().update_rows(i))), read_all(file, "final_weights/" + p), 1e-6) ==
            "");
    }
  } else {
    for (const auto& p : file.names("final_bias_quantile")) {
      CAPTURE(p);
      const int i = t->table().find(p);
      REQUIRE(i >= 0);
      CHECK(difference(values_of(t->params().stored(i, t->params().update_rows(i))), read_all(file, "final_bias_quantile/" + p),
                       1e-6) == "");
    }
  }
}

}  // namespace

TEST_CASE("logits, losses, counts and every gradient of the K3.1 kind are those of an independent program") {
  check_forward_and_gradients("tiny.h5");
}
TEST_CASE("logits, losses, counts and every gradient of the Kimi-Linear kind are those of an independent program") {
  check_forward_and_gradients("tiny_plain.h5");
}
TEST_CASE("logits, loss and every gradient are those of the transformers library's own Kimi-Linear class") {
  check_forward_and_gradients("kimi_linear.h5");
}
TEST_CASE("a folder that the transformers library saved gives the library's logits, loss and every gradient") {
  check_imported(DType::f64, {});
  check_imported(DType::f32, {1e-5, 1e-4});
}
TEST_CASE("ten steps of the K3.1 kind have the losses, norms and weights of an independent program") {
  check_ten_steps("tiny.h5", core::Balance::none, "losses");
}
TEST_CASE("ten steps with quantile balancing have the losses and biases of an independent program") {
  check_ten_steps("tiny.h5", core::Balance::quantile, "losses_quantile");
}
TEST_CASE("ten steps of the Kimi-Linear kind have the losses, norms and weights of an independent program") {
  check_ten_steps("tiny_plain.h5", core::Balance::none, "losses");
}
