// measure_machine.cpp -- models that are trained to time operators, and messages sent to time links.
#include "core/measure_machine.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>

#include "core/trainer.h"
#include "memory/cuda_memory.h"
#include "ops/elementwise.h"
#include "ops/random.h"

namespace moetrain::core {
namespace {

double three_digits(double x) {
  if (!(x > 0)) return x;
  const double unit = std::pow(10, std::floor(std::log10(x)) - 2);
  return std::round(x / unit) * unit;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Widths that fill the device: of a GPU those of configs/bench_h200_4b.yaml, of a CPU small ones.
Config model_of(Device device, DType dtype, bool sparse) {
  const bool gpu = device == Device::cuda;
  Config c;
  c.run.dtype = dtype;
  c.run.device = gpu ? DeviceChoice::cuda : DeviceChoice::cpu;
  auto& m = c.model;
  m.vocab_size = gpu ? 32768 : 1024;
  m.hidden_size = gpu ? 2048 : 256;
  m.num_hidden_layers = 2;
  m.num_attention_heads = gpu ? 16 : 4;
  m.intermediate_size = gpu ? 8192 : 512;
  m.q_lora_rank = gpu ? 1536 : 64;
  m.kv_lora_rank = gpu ? 512 : 64;
  m.qk_nope_head_dim = gpu ? 128 : 32;
  m.qk_rope_head_dim = gpu ? 64 : 16;
  m.v_head_dim = gpu ? 128 : 32;
  m.linear_attn = {.num_heads = (gpu ? 16 : 4) * (sparse ? 2 : 1),
                   .head_dim = gpu ? 128 : 32,
                   .short_conv_kernel_size = 4,
                   .gate_lower_bound = -5.0,
                   .use_full_rank_gate = true,
                   .full_attn_layers = {2},
                   .kda_layers = {}};
  if (sparse) m.dsa = IndexerConfig{.index_n_heads = gpu ? 32 : 4, .index_head_dim = gpu ? 128 : 16, .index_topk = gpu ? 2048 : 64};
  m.num_experts = gpu ? 64 : 8;
  m.num_experts_per_token = gpu ? 8 : 2;
  m.moe_intermediate_size = gpu ? 1024 : 128;
  c.data.sequence_length = gpu ? 8192 : 512;
  c.training.steps = 1000;
  c.training.micro_batch_size = gpu ? 1 : 2;
  return c;
}

io::Batch random_batch(const Config& c) {
  io::Batch b;
  const std::int64_t S = c.data.sequence_length, B = c.training.micro_batch_size;
  for (std::int64_t n = 0; n <= B; ++n) b.sequences.push_back(n * S);
  b.documents = b.sequences;
  for (std::int64_t t = 0; t <= B * S; ++t)
    b.tokens.push_back(std::int32_t(ops::philox(1, 1, std::uint64_t(t))[0] % std::uint64_t(c.model.vocab_size)));
  b.labels.assign(b.tokens.begin() + 1, b.tokens.end());
  b.tokens.pop_back();
  return b;
}

struct Timed {
  ops::Work work;  // of all calls
  std::int64_t calls = 0;
  double seconds = std::numeric_limits<double>::infinity();
};
using ByOp = std::map<std::string, Timed>;

// A dry step says what each operator does, the least of some real ones how long it takes.
ByOp timed_steps(const Config& c, Device device) {
  constexpr int kSteps = 4;
  const std::vector<io::Batch> batches{random_batch(c)};
  ByOp by_op;
  {
    Trainer dry(c, parallel::dry(0, 1), Device::dry);
    dry.context().on_work = [&](const char* op, const ops::Work& work) {
      Timed& t = by_op[op];
      const ops::Work before = t.work;
      t.work = work;
      t.work += before;
      ++t.calls;
    };
    dry.step(batches);
  }
  Trainer real(c, parallel::solo(), device);
  real.initialize();
  for (int step = 0; step < kSteps; ++step) {
    ops::OpTimes times;
    real.context().times = &times;
    real.step(batches);
    times.collect();
    for (const auto& [op, entry] : times.by_op)
      if (const auto found = by_op.find(op); found != by_op.end())
        found->second.seconds = std::min(found->second.seconds, entry.seconds);
  }
  return by_op;
}

struct Sum {
  double flops = 0, seconds = 0, bytes = 0, turns = 0;
  Sum& operator+=(const Sum& o) {
    flops += o.flops, seconds += o.seconds, bytes += o.bytes, turns += o.turns;
    return *this;
  }
  void add(const Timed& t, double launch_s) {
    flops += t.work.flops, bytes += t.work.bytes, turns += t.work.turns;
    seconds += std::max(t.seconds - double(t.calls) * launch_s, 1e-9);
  }
};
using Sums = std::array<std::array<Sum, 2>, ops::kWorkKinds>;

Sums by_kind(const ByOp& by_op, double launch_s) {
  Sums sums;
  for (const auto& [op, t] : by_op)
    if (std::isfinite(t.seconds)) sums[std::size_t(t.work.kind)][t.work.backward].add(t, launch_s);
  return sums;
}

double launch_seconds(Device device) {
  constexpr int kCalls = 2000;
  Memory memory(device);
  Stack stack(memory, Category::workspace);
  ops::Context ctx{.scratch = stack};
  const Tensor one = stack.zeros(DType::f32, {1});
  const auto calls = [&] {
    const double start = now();
    for (int i = 0; i < kCalls; ++i) ops::scale(ctx, ops::Scale{.factor = 1, .y = one});
    float there = 0;
    copy_to_host(device, &there, one.data, sizeof there);  // waits for them
    return (now() - start) / kCalls;
  };
  calls();
  return std::min(calls(), calls());
}

// The least of some, the largest of any rank.
double message_seconds(parallel::Communicator& group, parallel::Communicator& world, const std::function<void()>& send) {
  constexpr int kTimes = 5;
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kTimes; ++i) {
    world.barrier();
    const double start = now();
    send();
    group.settle();
    double seconds = now() - start;
    world.all_reduce(Tensor(&seconds, DType::f64, {1}), parallel::Reduction::max);
    least = std::min(least, seconds);
  }
  return least;
}

// here: ranks of the group on one host, whose messages to other hosts share its link (parallel/network.h); 1 inside a host.
parallel::Link link_of(parallel::Communicator& group, parallel::Communicator& world, Device device, std::int64_t here) {
  constexpr std::int64_t kBytes = std::int64_t(8) << 20, kFew = 8;
  const std::int64_t n = group.size();
  Memory memory(device);
  const Buffer from(memory, Category::communication, kBytes), to(memory, Category::communication, n * kBytes);
  fill(device, from.data(), 0, kBytes);
  const auto gather = [&](std::int64_t bytes) {
    const parallel::Communicator::Gather piece{from.data(), to.data(), bytes};
    return message_seconds(group, world, [&] { group.all_gather({&piece, 1}); });
  };
  const double few = gather(kFew), many = gather(kBytes);
  return {double((n - here) * kBytes) / double(here) / std::max(many - few, 1e-9), few / std::bit_width(unsigned(n - 1))};
}

void measure_links(Machine& m, parallel::Communicator& world, int local_ranks) {
  m.network.ranks_a_host = local_ranks;
  if (world.size() == 1) {
    m.network.near = m.network.far = {m.memory_bytes_per_s / 2, m.launch_s};
    return;
  }
  std::vector<int> all, here;
  for (int r = 0; r < world.size(); ++r) {
    all.push_back(r);
    if (r / local_ranks == world.rank() / local_ranks) here.push_back(r);
  }
  auto data = world.subgroup(all, parallel::Communicator::Lane::control, "measured");
  if (m.device == Device::cuda) data = parallel::on_devices(std::move(data));
  const auto near = data->subgroup(here);
  if (local_ranks > 1) m.network.near = link_of(*near, world, m.device, 1);
  m.network.far = world.size() > local_ranks ? link_of(*data, world, m.device, local_ranks) : m.network.near;
  if (local_ranks == 1) m.network.near = m.network.far;
}

void round_all(Machine& m) {
  for (double* x :
       {&m.memory_bytes_per_s, &m.rows_bytes_per_s, &m.launch_s, &m.queue_s, &m.turn_s[0], &m.turn_s[1], &m.host_bytes_per_s,
        &m.network.near.bytes_per_s, &m.network.near.latency_s, &m.network.far.bytes_per_s, &m.network.far.latency_s})
    *x = three_digits(*x);
  for (auto& [dtype, rates] : m.flops_per_s)
    for (PassRates& passes : rates)
      for (double& rate : passes) rate = three_digits(rate);
}

std::int64_t memory_of(Device device, int local_ranks) {
  if constexpr (kHasCuda)
    if (device == Device::cuda) return cuda::room().total_bytes;
  return std::int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / local_ranks;
}

}  // namespace

Machine measure_machine(const std::string& name, Device device, parallel::Communicator& world, int local_ranks,
                        const std::function<void(const std::string&)>& say) {
  Machine m{.name = name, .device = device, .memory_bytes = memory_of(device, local_ranks), .launch_s = launch_seconds(device)};
  m.queue_s = device == Device::cuda ? m.launch_s : 0;
  m.beside = device == Device::cuda;
  std::vector<DType> types{DType::bf16, DType::f32};
  if (device == Device::cpu) types.push_back(DType::f64);
  Sum optimizer, rows;
  for (const DType dtype : types) {
    say(std::string("operators in ") + name_of(dtype));
    const Sums dense = by_kind(timed_steps(model_of(device, dtype, false), device), m.launch_s);
    const Sums sparse = by_kind(timed_steps(model_of(device, dtype, true), device), m.launch_s);
    KindRates& rates = m.flops_per_s[dtype];
    for (std::size_t k = 0; k < ops::kWorkKinds; ++k)
      for (std::size_t pass = 0; pass < 2; ++pass) {
        const Sum &a = dense[k][pass], &b = sparse[k][pass];
        if (ops::WorkKind(k) == ops::WorkKind::optimizer) optimizer += a, optimizer += b;
        if (ops::WorkKind(k) == ops::WorkKind::rows) rows += a, rows += b;
        double turn = 0;
        if (a.turns > 0 && device == Device::cuda) {  // both models: seconds = turns turn + flops / rate
          turn = std::max(0.0, (a.seconds * b.flops - b.seconds * a.flops) / (a.turns * b.flops - b.turns * a.flops));
          if (dtype == types[0]) m.turn_s[pass] = turn;
        }
        const double seconds = a.seconds + b.seconds - turn * (a.turns + b.turns);
        rates[k][pass] = seconds > 0 ? (a.flops + b.flops) / seconds : 0;
      }
    for (PassRates& passes : rates) {  // a kind with one pass
      if (passes[1] == 0) passes[1] = passes[0];
      if (passes[0] == 0) passes[0] = passes[1];
    }
  }
  m.memory_bytes_per_s = optimizer.bytes / optimizer.seconds;
  m.rows_bytes_per_s = rows.bytes / rows.seconds;
  m.host_bytes_per_s = link_bytes_per_second(device);
  say("messages between " + std::to_string(world.size()) + (world.size() == 1 ? " rank" : " ranks"));
  measure_links(m, world, local_ranks);
  round_all(m);
  return m;
}

}  // namespace moetrain::core
