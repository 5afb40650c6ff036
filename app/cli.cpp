// cli.cpp -- the command line: one subcommand a command, help with examples, and the version.
#include "app/cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <sstream>

#include "io/byte_count.h"
#include "io/hdf5_file.h"
#include "memory/cuda_memory.h"
#include "memory/device.h"
#include "parallel/mpi_session.h"
#include "version.h"

namespace moetrain::app {
namespace {

constexpr const char* kCommands[] = {"train", "check", "plan", "inspect", "import", "export", "bench", "verify"};

std::string version_text() {
  std::string text = std::string("moetrain ") + kVersion + " (commit " + kCommit + ")\n";
  text += "MPI     " + parallel::mpi_version() + "\n";
  text += "HDF5    " + io::hdf5_version() + "\n";
  if constexpr (kHasCuda) {
    text += "CUDA    compiled in; devices seen: " + std::to_string(cuda::devices()) + "\n";
    text += std::string("NCCL    ") + (*kNcclVersion != '\0' ? kNcclVersion : "not compiled in") + "\n";
  } else {
    text += "CUDA    not compiled in\n";
  }
  return text;
}

[[noreturn]] void refuse(const std::string& why, const std::string& help) {
  throw Error(why + " (see " + help + ")", ExitCode::bad_job);
}

// `moetrain JOB.yaml` means train. A first word that is neither a command nor looks like a file is a mistyped command.
std::vector<std::string> with_command(int argc, const char* const* argv) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (words.empty()) refuse("no command: moetrain JOB.yaml trains", "moetrain --help");
  const std::string& first = words[0];
  if (first == "-h" || first == "--help" || first == "--version" ||
      std::count(std::begin(kCommands), std::end(kCommands), first) > 0)
    return words;
  const bool file = first.find_first_of("./") != std::string::npos || std::filesystem::exists(first);
  if (first[0] != '-' && !file)
    refuse("unknown command " + first + ": neither train, check, plan, inspect, import, export, bench, verify nor a job file", "moetrain --help");
  words.insert(words.begin(), "train");
  return words;
}

// The library's own words for a number out of range are its limits with all their digits.
CLI::Validator whole_number(std::int64_t low, std::int64_t high, const char* allowed) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        std::int64_t n = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
        if (error == std::errc() && end == text.data() + text.size() && n >= low && n <= high) return {};
        return "is '" + text + "', expected integer " + allowed;
      },
      "");
}
CLI::Validator number_of_ranks() { return whole_number(1, 1 << 20, "in [1, 1048576]"); }
CLI::Validator number_of_steps() { return whole_number(1, std::numeric_limits<std::int64_t>::max(), ">= 1"); }

// A size becomes its bytes.
CLI::Validator size() {
  return CLI::Validator(
      [](std::string& text) -> std::string {
        const auto size = io::parse_byte_count(text);
        if (!size || size->bytes < 1) return "is '" + text + "', expected a size of at least 1 byte, as 141GB, 80GiB or 4096";
        text = std::to_string(size->bytes);
        return {};
      },
      "");
}

void add_job(CLI::App& command, JobArguments& job) {
  command.add_option("JOB.yaml", job.path, "The job file; configs/README.md explains every key")->required()->type_name("");
  command.add_option("--set", job.set, "A key to set after the file was read, as often as needed: --set training.steps=20")
      ->type_name("SECTION.KEY=VALUE")
      ->allow_extra_args(false);
}

CLI::App& add_train(CLI::App& app, TrainArguments& a) {
  CLI::App& c = *app.add_subcommand("train", "Train the job; under mpirun or srun, one process a rank");
  add_job(c, a.job);
  c.add_option("--resume", a.resume,
               "auto: from <run.dir>/checkpoints/latest if there is one (default); never: from the start; or a step folder to "
               "start from, or the newest of a run folder or of its checkpoints")
      ->type_name("auto|never|PATH");
  c.add_option("--stop-after", a.stop_after, "End after a checkpoint when this run has done N steps")
      ->type_name("N")
      ->check(number_of_steps());
  c.footer(
      "Examples:\n"
      "  moetrain job.yaml\n"
      "  mpirun -n 4 moetrain train job.yaml --set parallel.expert_parallel=4\n"
      "  moetrain job.yaml --resume never --stop-after 100\n"
      "SIGUSR1 or SIGTERM: save and stop after the step, exit code 5.\n"
      "Exit codes: 0 done, 2 the job or the command line is wrong, 3 the run failed, 4 a rank was lost, 5 stopped by a signal "
      "after\n"
      "saving, 6 gave up after repeated non-finite steps.");
  return c;
}

CLI::App& add_check(CLI::App& app, CheckArguments& a) {
  CLI::App& c = *app.add_subcommand("check", "Print every fault of a job, with line and key; touches no device");
  add_job(c, a.job);
  c.add_option("--ranks", a.ranks, "Judge the job for this number of ranks")->type_name("N")->check(number_of_ranks());
  c.footer("Examples:\n  moetrain check job.yaml\n  moetrain check job.yaml --ranks 64\nExit codes: 0 no fault, 2 faults.");
  return c;
}

std::string not_empty(const std::string& text) { return text.empty() ? "must not be empty" : ""; }

CLI::App& add_plan(CLI::App& app, PlanArguments& a) {
  CLI::App& c = *app.add_subcommand(
      "plan", "Parameters, bytes of every rank and FLOPs of a step, without running it; touches no device and no data");
  add_job(c, a.job);
  c.add_option("--ranks", a.ranks, "Judge the job for this number of ranks")->type_name("N")->check(number_of_ranks());
  c.add_option("--device-memory", a.device_memory, "Memory of one device, as 141GB or 80GiB: says whether the job fits")
      ->type_name("SIZE")
      ->transform(size());
  c.add_option("--host-memory", a.host_memory, "Memory of the host for one rank, as 2TB: says whether the job fits")
      ->type_name("SIZE")
      ->transform(size());
  c.add_option("--machine", a.machine,
               "Predicts a step's time on it, and judges the job by its memory: a file of bench --machine, or a name of "
               "configs/machines; h200 for a job of GPUs unless told, then for the time alone")
      ->check(not_empty)
      ->type_name("FILE|NAME");
  c.add_flag("--search", a.search,
             "Proposes layouts and memory settings of the same model and global batch, of least predicted time, for --ranks N (the "
             "job's number unless told)");
  c.add_flag("--json", a.json, "One JSON object instead of tables");
  c.footer(
      "Examples:\n  moetrain plan job.yaml\n  moetrain plan job.yaml --device-memory 141GB --json\n  moetrain plan job.yaml --set "
      "parallel.expert_parallel=8 --set parallel.data_parallel=2\n  moetrain plan job.yaml --machine h200 --search --ranks 64");
  return c;
}

CLI::App& add_inspect(CLI::App& app, InspectArguments& a) {
  CLI::App& c = *app.add_subcommand("inspect", "What a checkpoint, a token file or a Hugging Face folder holds");
  c.add_option("PATH", a.path,
               "A run folder, its checkpoints folder (the newest one), a step folder, a token file, a .safetensors file or a "
               "folder of them")
      ->required()
      ->type_name("");
  c.footer(
      "Examples:\n  moetrain inspect runs/run/checkpoints\n  moetrain inspect train.h5\n  moetrain inspect "
      "Kimi-Linear-48B-A3B-Instruct");
  return c;
}

CLI::App& add_import(CLI::App& app, ImportArguments& a) {
  CLI::App& c = *app.add_subcommand("import", "The weights of a Hugging Face folder as a checkpoint; under mpirun each rank reads a part");
  c.add_option("HF_FOLDER", a.folder, "config.json and safetensors of Kimi K3, K3.1 or Kimi-Linear")->required()->type_name("");
  c.add_option("--out", a.out, "The checkpoint to be made; must not be there")->required()->check(not_empty)->type_name("CHECKPOINT");
  c.add_option("--job", a.job, "Also write what a job that starts from it says of the model; must not be there")->type_name("OUT.yaml");
  c.footer(
      "Names, shapes and types are all accounted for before a value is read; memory holds some tens of MiB.\n"
      "Examples:\n  moetrain import Kimi-Linear-48B-A3B-Base --out kimi-linear --job kimi-linear.yaml\n  mpirun -n 8 moetrain import "
      "Kimi-K3 --out kimi-k3\n"
      "A job may also start from the folder itself, model.init_from: Kimi-Linear-48B-A3B-Base\n"
      "Exit codes: 0 done, 2 the command line is wrong, 3 the folder is wrong or the disk refused; then nothing is left.");
  return c;
}

CLI::App& add_export(CLI::App& app, ExportArguments& a) {
  CLI::App& c = *app.add_subcommand("export", "A checkpoint as a Hugging Face folder; under mpirun each rank writes some of the files");
  c.add_option("CHECKPOINT", a.checkpoint, "A step folder, or the newest of a run folder or of its checkpoints")->required()->type_name("");
  c.add_option("--to", a.to, "hf: config.json and safetensors of the text model; peft: the adapters alone, as the peft library reads them")
      ->required()
      ->type_name("hf|peft")
      ->check(CLI::IsMember({"hf", "peft"}));
  c.add_option("--out", a.out, "The folder to be made; must not be there")->required()->check(not_empty)->type_name("FOLDER");
  c.add_flag("--merge", a.merge, "hf: of a run with adapters, the weights with them merged in");
  c.add_option("--experts", a.experts,
               "How the model that takes the adapters holds experts; separate: w1, w2, w3 of each, as published code does (default); "
               "fused: gate_up_proj and down_proj of all, as transformers' KimiLinearForCausalLM does")
      ->type_name("separate|fused")
      ->check(CLI::IsMember({"separate", "fused"}));
  c.add_option("--base", a.base, "The model under the adapters, a folder or a name; the run's model.init_from unless told")->type_name("NAME");
  c.footer(
      "Every tensor keeps the type it is stored in; a tokenizer and generation_config.json are to be put beside by hand.\n"
      "Examples:\n  moetrain export runs/run --to hf --out exported\n  moetrain export runs/run/checkpoints/step_00000100 --to hf --out "
      "exported\n  moetrain export runs/lora --to hf --merge --out merged\n  moetrain export runs/lora --to peft --experts fused --base Kimi-Linear-48B-A3B-Base --out adapters\n"
      "Exit codes: 0 done, 2 the command line is wrong, 3 the checkpoint is wrong or the disk refused; then nothing is left.");
  return c;
}

CLI::App& add_bench(CLI::App& app, BenchArguments& a) {
  CLI::App& c = *app.add_subcommand("bench", "Operators on this machine's GPU, each beside the time its bytes and FLOPs need at least");
  c.add_option("NAME", a.names, "Operators to time; all unless told")->type_name("");
  c.add_flag("--json", a.json, "One JSON object instead of a table");
  c.add_option(
       "--machine", a.machine,
       "Instead writes what this machine does in a second, for plan --machine: on its GPU where the build has CUDA and sees one, "
       "else on its CPU; under mpirun also what messages between ranks take")
      ->check(not_empty)
      ->type_name("OUT.yaml");
  c.footer("Examples:\n  moetrain bench\n  moetrain bench linear cross_entropy\n  moetrain bench --json");
  return c;
}

CLI::App& add_verify(CLI::App& app, VerifyArguments& a) {
  CLI::App& c = *app.add_subcommand(
      "verify", "Every operator of the job on this machine's GPU, at the job's shapes, beside the CPU's in f64");
  add_job(c, a.job);
  c.footer(
      "Needs neither the job's data nor its other ranks. Sums are compared at their whole length, for some rows, heads and experts,\n"
      "which run.seed chooses.\n"
      "Examples:\n  moetrain verify job.yaml\n  moetrain verify job.yaml --set run.seed=2\n"
      "Exit codes: 0 all right, 2 the job is wrong, 3 an operator is wrong or there is no GPU.");
  return c;
}

}  // namespace

Command parse(int argc, const char* const* argv) {
  std::vector<std::string> words = with_command(argc, argv);
  CLI::App app("Trains sparse mixture-of-experts models with hybrid attention. One YAML file is the whole job.", "moetrain");
  app.require_subcommand(1);
  app.footer("moetrain JOB.yaml is the same as moetrain train JOB.yaml. Each command has its own --help.");
  bool version = false;
  app.add_flag("--version", version, "Version, commit, libraries and devices");
  TrainArguments train;
  CheckArguments check;
  PlanArguments plan;
  InspectArguments inspect;
  ImportArguments import;
  ExportArguments exports;
  BenchArguments bench;
  VerifyArguments verify;
  const CLI::App &train_app = add_train(app, train), &check_app = add_check(app, check), &plan_app = add_plan(app, plan);
  const CLI::App &import_app = add_import(app, import), &export_app = add_export(app, exports);
  const CLI::App &bench_app = add_bench(app, bench), &verify_app = add_verify(app, verify);
  add_inspect(app, inspect);
  if (words[0] == "--version") return Answer{version_text()};
  const std::string command = words[0];
  try {
    std::reverse(words.begin(), words.end());  // the library takes the last one first
    app.parse(words);
  } catch (const CLI::Success& asked) {  // help
    std::ostringstream text;
    app.exit(asked, text, text);
    return Answer{text.str()};
  } catch (const CLI::ParseError& wrong) {
    const auto left = app.remaining(/*recurse=*/true);  // what is unknown first: it may be why something else is missing
    const auto unknown = std::find_if(left.begin(), left.end(), [](const std::string& word) { return word.starts_with('-'); });
    refuse(command + ": " + (unknown == left.end() ? wrong.what() : "unknown option " + *unknown),
           "moetrain " + command + " --help");
  }
  if (train_app.parsed()) return train;
  if (check_app.parsed()) return check;
  if (plan_app.parsed()) return plan;
  if (import_app.parsed()) return import;
  if (export_app.parsed() && exports.to != "peft" && export_app.count("--experts") + export_app.count("--base") > 0)
    refuse("export: --experts and --base are of --to peft", "moetrain export --help");
  if (export_app.parsed() && exports.merge && exports.to != "hf") refuse("export: --merge is of --to hf", "moetrain export --help");
  if (export_app.parsed()) return exports;
  if (bench_app.parsed() && !bench.machine.empty() && (bench.json || !bench.names.empty()))
    refuse("bench: --machine measures what it needs, without NAME or --json", "moetrain bench --help");
  if (bench_app.parsed()) return bench;
  if (verify_app.parsed()) return verify;
  return inspect;
}

}  // namespace moetrain::app
