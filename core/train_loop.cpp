// train_loop.cpp -- resume, steps, evaluation, checkpoints, the run folder, and the end.
#include "core/train_loop.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <optional>

#include "core/checkpoint.h"
#include "core/checkpoint_saver.h"
#include "core/import.h"
#include "core/monitor.h"
#include "core/plan.h"
#include "core/together.h"
#include "core/trainer.h"
#include "io/files.h"
#include "io/folders.h"
#include "io/run_log.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

io::DataOptions data_options(const Config& c, const std::vector<std::string>& paths, const std::vector<std::string>& exclude) {
  return {.paths = paths,
          .format = c.data.format,
          .sequence_length = c.data.sequence_length,
          .packing = c.data.packing,
          .shuffle = c.data.shuffle,
          .seed = c.run.seed,
          .exclude = exclude,
          .skip_bad_lines = c.data.skip_bad_lines,
          .vocab_size = c.model.vocab_size};
}

std::int64_t host_peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The log's file, attached to the default logger while a run lasts.
class LogFile {
 public:
  explicit LogFile(const std::string& path) : sink_(std::make_shared<spdlog::sinks::basic_file_sink_mt>(path)) {
    sink_->set_pattern("%Y-%m-%d %H:%M:%S  %v");
    spdlog::default_logger()->sinks().push_back(sink_);
  }
  ~LogFile() {
    auto& sinks = spdlog::default_logger()->sinks();
    std::erase(sinks, std::static_pointer_cast<spdlog::sinks::sink>(sink_));
  }
  void only_here(const std::string& line) {  // what the terminal is told by someone else
    spdlog::details::log_msg message(spdlog::source_loc{}, "", spdlog::level::err, line);
    sink_->log(message);
  }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

 private:
  std::shared_ptr<spdlog::sinks::basic_file_sink_mt> sink_;
};

class Run {
 public:
  Run(const Config& config, std::unique_ptr<parallel::Communicator> world, Device device, const TrainOptions& options)
      : config_(config),
        options_(options),
        checkpoints_(config.run.dir + "/checkpoints"),
        flops_per_token_(step_flops(config, 1).total()),
        trainer_(config, std::move(world), device),
        control_(*trainer_.mesh().world().control),
        saver_(trainer_, checkpoints_, config.checkpoint.keep, [this](const CheckpointSaver::Saved& s) { tell(s); }) {}

  ExitCode run() {
    try {
      return all_of_it();
    } catch (const AgreedError& e) {
      if (log_file_) log_file_->only_here(e.what());
      if (e.code() != ExitCode::rank_lost) finish_saving();
      throw;
    } catch (const std::exception& e) {
      if (log_file_) log_file_->only_here(e.what());
      throw;
    }
  }

 private:
  bool main_rank() const { return control_.rank() == 0; }

  // All ranks leave for another reason: what was begun before it is still a whole checkpoint.
  void finish_saving() {
    try {
      saver_.finish();
    } catch (const AgreedError& e) {
      if (main_rank()) spdlog::warn("{}", e.what());
    }
  }

  ExitCode all_of_it() {
    control_.enter(parallel::Phase::load);
    compare_jobs();
    together(control_, [&] { open_data(); });
    start();
    reached();
    together(control_, [&] { open_run_folder(); });
    ExitCode code = ExitCode::done;
    std::string cause = "all steps done";
    const std::int64_t first = trainer_.progress().step;
    while (trainer_.progress().step < config_.training.steps) {
      if (requested()) {
        code = ExitCode::stopped;
        cause = "stopped by a signal";
        break;
      }
      one_step();
      if (nonfinite_in_a_row_ > 0 && nonfinite_in_a_row_ >= config_.training.max_nonfinite) {
        code = ExitCode::gave_up;
        cause = "gave up after " + std::to_string(nonfinite_in_a_row_) + " steps in a row without finite gradients";
        break;
      }
      if (options_.stop_after > 0 && trainer_.progress().step - first >= options_.stop_after) {
        cause = "stopped after " + std::to_string(options_.stop_after) + " steps as asked";
        break;
      }
    }
    finish(code, cause);
    return code;
  }

  void reached() const {
    if (options_.reached) options_.reached(trainer_.progress().step);
  }

  // One job on all ranks, also where a preset is read from a disk of each rank's own.
  void compare_jobs() {
    const std::string mine = io::to_yaml(config_to_yaml(config_));
    std::string first = mine;
    std::int64_t length = std::int64_t(first.size());
    control_.broadcast(&length, sizeof length, 0);
    first.resize(std::size_t(length));
    control_.broadcast(first.data(), length, 0);
    together(control_, [&] {
      if (mine != first)
        throw Error("this rank understands the job otherwise than rank 0; is model.preset another file here?", ExitCode::bad_job);
    });
  }

  // Every evaluation reads the same sequences: read once, what is wrong with them is found before the first step.
  void open_data() {
    train_ = std::make_unique<io::BatchSource>(data_options(config_, config_.data.train, config_.data.exclude));
    remarks_ = train_->remarks();
    if (config_.data.eval.empty()) return;
    const io::BatchSource held_out(data_options(config_, config_.data.eval, {}));
    held_out_ = trainer_.evaluation_batches(held_out, config_.training.eval_batches);
    remarks_.insert(remarks_.end(), held_out.remarks().begin(), held_out.remarks().end());
  }

  // Weights: those of a checkpoint of this run, else of model.init_from, else fresh. Rank 0 decides, since another rank may see an older state of a shared disk.
  void start() {
    std::string from;
    together(control_, [&] {
      if (!main_rank()) return;
      io::make_folder(config_.run.dir);
      lock_ = io::lock_file(config_.run.dir + "/.lock", "another run is using this run.dir");
      const std::string latest = latest_checkpoint(checkpoints_);
      if (options_.resume == "auto") {
        from = latest;
      } else {
        if (!latest.empty()) check_same_run(config_, latest);  // what another job left in run.dir is not overwritten
        if (options_.resume != "never" && (from = checkpoint_at(options_.resume)).empty())
          throw Error(options_.resume + ": neither the folder of a checkpoint nor a run folder that has one");
      }
    });
    std::int64_t length = std::int64_t(from.size());
    control_.broadcast(&length, sizeof length, 0);
    from.resize(std::size_t(length));
    control_.broadcast(from.data(), length, 0);
    if (from.empty() && config_.model.init_from.empty()) return trainer_.initialize();
    if (from.empty()) {
      initialize_from(trainer_, config_.model.init_from);
      if (main_rank()) spdlog::info("weights from {}", config_.model.init_from);
      return;
    }
    load_checkpoint(trainer_, from, options_.resume == "auto");
    saved_step_ = options_.resume == "auto" ? trainer_.progress().step : -1;
    if (main_rank()) spdlog::info("resumed from {} at step {}", from, trainer_.progress().step);
  }

  void open_run_folder() {
    if (!main_rank()) return;
    io::make_folder(checkpoints_);
    log_file_.emplace(config_.run.dir + "/log.txt");
    io::remove_exit(config_.run.dir);
    io::write_text_atomically(config_.run.dir + "/job.yaml", io::to_yaml(config_to_yaml(config_)));
    log_.emplace(config_.run.dir, metric_columns(), trainer_.model().moe_layers(), config_.model.num_experts);
    if (const auto rows = log_->resume_after(trainer_.progress().step); rows < trainer_.progress().step)
      spdlog::warn("{}/metrics.csv holds {} of the {} steps before this one; the others are lost", config_.run.dir, rows,
                   trainer_.progress().step);
    for (const auto& remark : remarks_) spdlog::warn("{}", remark);
    const auto counts = count_parameters(config_);
    const auto axis = [](const char* name, int ranks) {
      return ranks > 1 ? std::string(" x ") + name + " " + std::to_string(ranks) : "";
    };
    spdlog::info(
        "{}: {} parameters, {} active a token; {} ranks: data {} x expert {}{}{}; {} sequences of {} tokens a step; {} windows of "
        "training data",
        config_.run.name, counts.total, counts.active_per_token, control_.size(), config_.parallel.data_parallel,
        config_.parallel.expert_parallel, axis("sequence", config_.parallel.sequence_parallel),
        axis("tensor", config_.parallel.tensor_parallel), config_.sequences_per_step(), config_.data.sequence_length,
        train_->windows());
    tell_memory();
  }

  void tell_memory() {
    const auto tell = [](const char* where, const Memory& memory) {
      if (memory.total() == 0) return;
      spdlog::info("{} memory of this rank before its first step:", where);
      for (const std::string& line : memory.table()) spdlog::info("  {}", line);
    };
    tell("device", trainer_.memory());
    tell("host", trainer_.host_memory());
  }

  void one_step() {
    control_.enter(parallel::Phase::step);
    const bool profiled = trainer_.progress().step - first_profiled() < config_.monitor.profile_steps;
    trainer_.context().times = profiled ? &times_ : nullptr;
    const auto start = std::chrono::steady_clock::now();
    const auto waited = trainer_.mesh().traffic().exposed_seconds;
    std::vector<io::Batch> batches;
    together(control_, [&] { batches = trainer_.next_batches(*train_); });
    const bool undecided = trainer_.results() && !trainer_.results()->decided();
    const StepResult result = trainer_.step(batches);
    reached();
    times_.collect();  // the device's last op too is in the time of a profiled step
    StepMeasures m;
    m.seconds = seconds_since(start);
    const auto waited_since = trainer_.mesh().traffic().exposed_seconds;
    for (std::size_t p = 0; p < waited.size(); ++p) {
      m.exposed_comm_seconds += waited_since[p] - waited[p];
      if (profiled) waits_[p] += waited_since[p] - waited[p];
    }
    trainer_.context().times = nullptr;
    run_seconds_ += m.seconds;
    ++run_steps_;

    nonfinite_in_a_row_ = result.skipped == Skipped::nonfinite ? nonfinite_in_a_row_ + 1 : 0;
    const bool last = result.step == config_.training.steps;
    if (!held_out_.empty() && (last || (config_.training.eval_every > 0 && result.step % config_.training.eval_every == 0))) {
      m.eval_loss = trainer_.evaluate(held_out_);
      if (!m.eval_loss && main_rank()) spdlog::warn("step {}: no label in what is read of data.eval", result.step);
    }
    control_.enter(parallel::Phase::step);
    measure(result, m);
    together(control_, [&] { report(result, m); });
    if (profiled && run_steps_ == config_.monitor.profile_steps) report_times();
    if (undecided && trainer_.results()->decided() && main_rank()) spdlog::info("{}", table_of(trainer_.results()->candidates()));
    if (config_.checkpoint.every > 0 && result.step % config_.checkpoint.every == 0) {
      control_.enter(parallel::Phase::save);
      saved_step_ = result.step;
      config_.checkpoint.async ? saver_.begin() : saver_.save();
    }
  }

  // What all ranks measured, and with it whether they all made the same collectives since the run began.
  void measure(const StepResult& result, StepMeasures& m) {
    struct Measured {
      std::int64_t device_peak_bytes, pool_peak_bytes, host_peak_bytes;
      double pool_fragmentation;
      double exposed_comm_seconds;
      std::uint64_t calls;
      ResultCache::Figures cache;
      std::int64_t cache_host_bytes;
    };
    ResultCache* results = trainer_.results();
    const Pool& pool = trainer_.memory().pool();
    const Measured mine{trainer_.memory().peak(),
                        pool.high_water(),
                        host_peak_bytes(),
                        pool.fragmentation(),
                        m.exposed_comm_seconds,
                        control_.journal() ? control_.journal()->balance() : 0,
                        results ? results->take_figures() : ResultCache::Figures{},
                        results ? results->host_bytes() : 0};
    std::vector<Measured> all(std::size_t(control_.size()));
    const parallel::Communicator::Gather piece{&mine, all.data(), sizeof mine};
    control_.all_gather({&piece, 1});
    std::uint64_t calls = 0;
    for (const Measured& one : all) {
      m.device_peak_bytes = std::max(m.device_peak_bytes, one.device_peak_bytes);
      m.pool_peak_bytes = std::max(m.pool_peak_bytes, one.pool_peak_bytes);
      m.pool_fragmentation = std::max(m.pool_fragmentation, one.pool_fragmentation);
      m.host_peak_bytes = std::max(m.host_peak_bytes, one.host_peak_bytes);
      m.exposed_comm_seconds = std::max(m.exposed_comm_seconds, one.exposed_comm_seconds);
      calls += one.calls;
      if (!results) continue;
      if (!m.cache) m.cache = {.saved_seconds = one.cache.saved_seconds};
      m.cache->hits += one.cache.hits;
      m.cache->late += one.cache.late;
      m.cache->saved_seconds = std::min(m.cache->saved_seconds, one.cache.saved_seconds);
      m.cache_host_bytes = std::max(m.cache_host_bytes, one.cache_host_bytes);
    }
    if (calls != 0) {
      const auto found = parallel::find_difference(control_);
      throw AgreedError(found.rank, found.text, ExitCode::rank_lost);
    }
    m.model_flops = flops_per_token_ * double(result.tokens);
    m.ranks = control_.size();
    m.tokens_seen = trainer_.progress().tokens;
  }

  void report(const StepResult& r, const StepMeasures& m) {
    if (!main_rank()) return;
    const std::int64_t layers = trainer_.model().moe_layers(), E = config_.model.num_experts;
    log_->append(metric_row(config_, r, m),
                 layers > 0 ? ConstTensor(r.expert_tokens.data(), DType::i64, {layers, E}) : ConstTensor{});
    const double left = run_seconds_ / double(run_steps_) * double(config_.training.steps - r.step);
    spdlog::info("{}", step_line(config_, r, m, left));
    if (r.skipped == Skipped::no_labels) spdlog::warn("step {}: no label in the whole batch; update skipped", r.step);
    if (r.skipped == Skipped::nonfinite)
      spdlog::warn("step {}: loss {} or gradient norm {} is not finite; update skipped ({} in a row)", r.step, r.loss, r.grad_norm,
                   nonfinite_in_a_row_);
    if (layers == 0 || config_.monitor.expert_load_alert <= 0) return;
    const auto load = load_of(r.expert_tokens, layers, E);
    if (load && load->max > config_.monitor.expert_load_alert)
      spdlog::warn("step {}: expert {} of MoE layer {} got {:.1f} times the mean load (alert at {})", r.step, load->place,
                   load->layer, load->max, config_.monitor.expert_load_alert);
  }

  // All steps so far were profiled.
  void report_times() const {
    if (!main_rank()) return;
    if (run_steps_ == 0) return spdlog::info("no time by op: this run did no step");
    double total = 0;
    std::vector<std::pair<double, std::string>> rows;
    for (const auto& [name, entry] : times_.by_op) {
      total += entry.seconds;
      rows.emplace_back(entry.seconds, name);
    }
    std::sort(rows.rbegin(), rows.rend());
    const double steps = double(run_steps_);
    spdlog::info("time by op on this rank, a step, over {} steps of {:.1f} ms:", run_steps_, run_seconds_ / steps * 1e3);
    for (const auto& [seconds, name] : rows)
      spdlog::info("  {:28} {:9.3f} ms  {:5.1f} %  {:6.0f} calls", name, seconds / steps * 1e3, 100 * seconds / run_seconds_,
                   double(times_.by_op.at(name).calls) / steps);
    constexpr const char* kWaits[parallel::kPurposes] = {"waiting for weights", "waiting for sums", "waiting for experts' rows",
                                                         "waiting for others"};
    for (std::size_t p = 0; p < waits_.size(); ++p) {
      total += waits_[p];
      if (waits_[p] > 0) spdlog::info("  {:28} {:9.3f} ms  {:5.1f} %", kWaits[p], waits_[p] / steps * 1e3, 100 * waits_[p] / run_seconds_);
    }
    spdlog::info("  {:28} {:9.3f} ms  {:5.1f} %", "the rest", (run_seconds_ - total) / steps * 1e3,
                 100 * (run_seconds_ - total) / run_seconds_);
  }

  void tell(const CheckpointSaver::Saved& s) const {
    if (!main_rank()) return;
    if (config_.checkpoint.async)
      spdlog::info("checkpoint at step {} in {:.1f} s, {:.1f} s of them before the next step", s.step, s.seconds, s.copying);
    else
      spdlog::info("checkpoint at step {} in {:.1f} s", s.step, s.seconds);
  }

  // A signal on any rank stops all of them at the same step; a save goes on once no rank writes any more.
  bool requested() {
    std::int64_t now[2] = {options_.stop_requested && options_.stop_requested(), saver_.working()};
    control_.all_reduce(Tensor(now, DType::i64, {2}), parallel::Reduction::max);
    if (now[1] == 0) saver_.advance();
    return now[0] != 0;
  }

  void finish(ExitCode code, const std::string& cause) {
    if (run_steps_ < config_.monitor.profile_steps) report_times();
    control_.enter(parallel::Phase::save);
    saver_.finish();
    if (code != ExitCode::gave_up && saved_step_ != trainer_.progress().step) {
      saver_.save();
      saved_step_ = trainer_.progress().step;
    }
    control_.enter(parallel::Phase::exit);
    together(control_, [&] {
      if (!main_rank()) return;
      io::write_exit(config_.run.dir, code, cause, std::nullopt, trainer_.progress().step);
      spdlog::info("{}; run folder {}", cause, config_.run.dir);
    });
  }

  std::int64_t first_profiled() const { return trainer_.progress().step - run_steps_; }

  const Config& config_;
  const TrainOptions& options_;
  std::string checkpoints_;
  double flops_per_token_;
  Trainer trainer_;
  parallel::Communicator& control_;
  std::unique_ptr<io::BatchSource> train_;
  std::vector<io::Batch> held_out_;
  std::vector<std::string> remarks_;  // about the data
  io::Descriptor lock_;
  std::optional<LogFile> log_file_;
  std::optional<io::RunLog> log_;
  ops::OpTimes times_;
  std::array<double, parallel::kPurposes> waits_{};  // seconds of the profiled steps
  double run_seconds_ = 0;
  std::int64_t run_steps_ = 0, nonfinite_in_a_row_ = 0, saved_step_ = -1;
  CheckpointSaver saver_;  // goes first: it may still be writing
};

}  // namespace

ExitCode train(const Config& config, std::unique_ptr<parallel::Communicator> world, Device device, const TrainOptions& options) {
  return Run(config, std::move(world), device, options).run();
}

}  // namespace moetrain::core
