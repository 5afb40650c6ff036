// machine.h -- what a kind of machine does in a second, as it was measured; and from that how long an operator takes on it.
//
//   t = launch + max( flops / rate(kind, pass, type), bytes / memory(kind) ) + turns turn(pass)
//
// kind and pass are the operator's (ops/work.h), memory that of rows or of all others, turns the chunks of 64 rows of KDA that wait
// for each other. A rate is what operators of the kind reach at sizes that fill the machine, not what its data sheet says.
// Messages: parallel/network.h, memory/timeline.h.
#pragma once
#include <array>
#include <map>
#include <string>

#include "io/yaml.h"
#include "memory/device.h"
#include "ops/work.h"
#include "parallel/network.h"

namespace moetrain::core {

using PassRates = std::array<double, 2>;  // forward, backward
using KindRates = std::array<PassRates, ops::kWorkKinds>;

struct Machine {
  std::string name;
  Device device = Device::cuda;
  std::int64_t memory_bytes = 0;           // of one device
  double memory_bytes_per_s = 0;           // read and written together, by the optimizer
  double rows_bytes_per_s = 0;             // by operators that walk along rows
  double launch_s = 0;                     // an operator on the device beside its work: filling and draining it
  double queue_s = 0;                      // an operator on the host, which queues it; on a CPU nothing
  PassRates turn_s{};                      // a chunk of 64 rows after the one before
  std::map<DType, KindRates> flops_per_s;  // of kinds that have arithmetic; by the type of the operands
  parallel::Network network;               // without its clock
  double host_bytes_per_s = 0;             // between the device and host memory, one way
  bool beside = true;                      // messages travel while operators run
  double drag = 0;                         // by which an operator is slower meanwhile

  double seconds(const ops::Work& work) const;
};

// The description in a YAML file, or of a machine of configs/machines by its name. What is wrong with it is one Error of a bad job:
// a line a fault, as of a job file.
Machine read_machine(const std::string& name_or_path);
Machine machine_from(const io::YamlNode& node, const std::string& path);
io::YamlNode machine_to_yaml(const Machine& machine);

}  // namespace moetrain::core
