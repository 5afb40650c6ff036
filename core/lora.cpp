// lora.cpp -- targets to parameters; the product of the factors added to rows of a weight.
#include "core/lora.h"

#include <algorithm>

#include "core/host_values.h"
#include "io/pattern.h"

namespace moetrain::core {
namespace {

bool aims_at(const std::string& target, const Param& p) {
  const auto holds = [&](const char* part) { return p.name.find(part) != std::string::npos; };
  if (target == "attention") return holds(".self_attn.") && !holds(".indexer.");
  if (target == "shared") return holds(".shared_experts.");
  if (target == "expert_proj") return p.unit == UnitKind::experts;
  if (target == "latent") return holds(".routed_expert_");
  if (target == "head") return p.unit == UnitKind::head;
  return io::matches(target, p.name);
}

Adapter declare(const LoraConfig& lora, const Param& w, ParamTable& table) {
  const bool expert = w.unit == UnitKind::experts;
  const int first = expert;  // dim of the outputs
  const std::int64_t r = lora.rank, O = w.shape[first], I = w.shape[first + 1];
  if (r > std::max(O, I))
    throw Error("lora.rank: " + std::to_string(r) + " is more than both sides of " + w.name + " " + w.shape.text() +
                    ", where a rank above " + std::to_string(std::min(O, I)) + " adds nothing",
                ExitCode::bad_job);
  const std::string module = w.name.ends_with(".weight") ? w.name.substr(0, w.name.rfind('.')) : w.name;
  const auto factor = [&](const char* name, Shape shape, Init init, UnitKind unit) {
    const Cut cut = w.cut == (init == Init::zero ? Cut::rows : Cut::columns) ? w.cut : Cut::none;  // B has W's rows, A its columns
    return table.add({.name = module + name, .shape = shape, .init = init, .layer = w.layer, .unit = unit, .cut = cut});
  };
  Adapter made{.scale = lora.scale(), .dropout = lora.dropout};
  if (!expert)
    made.a = factor(".lora_A.weight", {r, I}, Init::fan_in, w.unit);
  else if (lora.shared_a)
    made.a = factor(".lora_A.weight", {r, I}, Init::fan_in, UnitKind::trunk);  // of all ranks, as the dense parameters of its layer
  else
    made.a = factor(".lora_A.weight", {w.shape[0], r, I}, Init::fan_in, w.unit);
  made.b = factor(".lora_B.weight", expert ? Shape{w.shape[0], O, r} : Shape{O, r}, Init::zero, w.unit);
  return made;
}

void add_adapters(const Config& c, ParamTable& table) {
  const LoraConfig& lora = *c.lora;
  const bool absorbed = c.model.dsa && c.loss.indexer_stage == IndexerStage::sparse;
  std::vector<bool> used(lora.target.size());
  for (int i = 0, n = table.size(); i < n; ++i) {
    const Param w = table[i];  // a copy: the table grows
    bool wanted = false;
    for (std::size_t k = 0; k < lora.target.size(); ++k)
      if (multiplies(w) && aims_at(lora.target[k], w)) used[k] = wanted = true;
    if (!wanted) continue;
    // An expert's rows have lost their place in the text, and an absorbed product never sees the latent.
    if (lora.dropout > 0 && (w.unit == UnitKind::experts || (absorbed && w.name.ends_with(".kv_b_proj.weight"))))
      throw Error("lora.dropout: not possible for the adapter of " + w.name + "; 0, or targets by name that leave it out",
                  ExitCode::bad_job);
    table.attach(i, declare(lora, w, table));
  }
  for (std::size_t k = 0; k < used.size(); ++k)
    if (!used[k]) throw Error("lora.target: '" + lora.target[k] + "' matches no matrix of this model", ExitCode::bad_job);
}

// w (O, I) += scale B A, rounded once.
template <class T>
void add_product(T* w, std::int64_t O, std::int64_t I, double scale, const double* b, const double* a, std::int64_t r) {
#pragma omp parallel for schedule(static)
  for (std::int64_t o = 0; o < O; ++o)
    for (std::int64_t i = 0; i < I; ++i) {
      double sum = 0;
      for (std::int64_t k = 0; k < r; ++k) sum += b[o * r + k] * a[k * I + i];
      w[o * I + i] = T(double(w[o * I + i]) + scale * sum);
    }
}

// `count` rows of a factor from `first` on.
std::vector<double> factor_rows(const WeightSource& source, const ParamTable& table, int param, std::int64_t first,
                                std::int64_t count) {
  const Shape shape = table[param].shape.with_dim0(count);
  std::vector<double> values(std::size_t(shape.count()));
  source.read(param, first, Tensor(values.data(), DType::f64, shape));
  return values;
}

}  // namespace

bool multiplies(const Param& p) { return p.decay && p.unit != UnitKind::embedding; }

void choose_trained(const Config& c, ParamTable& table) {
  if (c.lora || !c.training.trainable.empty()) table.freeze_all_but(c.training.trainable);
  if (c.lora) add_adapters(c, table);
  if (std::none_of(table.all().begin(), table.all().end(), [](const Param& p) { return p.trainable; }))
    throw Error("training.trainable: the patterns leave nothing to train", ExitCode::bad_job);
}

WeightSource merged(const WeightSource& source, const ParamTable& table) {
  return {source.path, [source, &table](int param, std::int64_t first, Tensor to) {
            source.read(param, first, to);
            const Adapter& adapter = table[param].adapter;
            if (!adapter.present()) return;
            const bool stacked = to.shape.rank() == 3, shared = stacked && table[adapter.a].shape.rank() == 2;
            const std::int64_t matrices = stacked ? to.shape[0] : 1, rows = to.shape[0];
            const std::int64_t O = to.shape[stacked], I = to.shape[stacked + 1], r = table[adapter.a].shape[stacked && !shared];
            const auto b = factor_rows(source, table, adapter.b, first, rows);
            const bool with_rows = stacked && !shared;  // A is cut as W is
            const auto a = factor_rows(source, table, adapter.a, with_rows ? first : 0, with_rows ? rows : r);
            for (std::int64_t m = 0; m < matrices; ++m) {
              const double *mb = b.data() + m * O * r, *ma = a.data() + (with_rows ? m * r * I : 0);
              if (to.dtype == DType::f64)
                add_product(to.as<double>() + m * O * I, O, I, adapter.scale, mb, ma, r);
              else if (to.dtype == DType::f32)
                add_product(to.as<float>() + m * O * I, O, I, adapter.scale, mb, ma, r);
              else
                add_product(to.as<bf16>() + m * O * I, O, I, adapter.scale, mb, ma, r);
            }
          }};
}

}  // namespace moetrain::core
