// mesh.h -- the axes of a job: rank <-> coordinates by plain arithmetic, and the groups of ranks along them.
#pragma once
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace moetrain::parallel {

// rank = ((dp * EP + ep) * SP + sp) * TP + tp
struct MeshShape {
  int data = 1, expert = 1, sequence = 1, tensor = 1;
  int ranks() const { return data * expert * sequence * tensor; }
};
struct Coordinates {
  int data = 0, expert = 0, sequence = 0, tensor = 0;
  bool operator==(const Coordinates&) const = default;
};
Coordinates coordinates_of(const MeshShape& shape, int rank);

// Along each axis data and control travel apart: stop flags and hashes never wait behind weights.
struct Axis {
  std::unique_ptr<Communicator> data;
  std::unique_ptr<Communicator> control;  // host memory, small messages
};

// The groups that this rank is in.
//   world         all ranks
//   dense         ranks that share dense parameters, cut over dp x ep x sp (equal tp)
//   expert        ranks that hold the experts of one whole set between them (equal dp, sp, tp)
//   expert_data   ranks that hold the same experts (equal ep): shard and sum those
//   sequence      ranks that hold the slices of the same sequences, in their order (equal dp, ep, tp)
//   tensor        ranks that cut matrices between them and share out the tokens of the same slices (equal dp, ep, sp)
//   uncut         all ranks, where a tensor cut divides other dense parameters, else the dense group
//   readers       ranks that read the same sequences (equal dp, ep), in the order of their tokens
class Mesh {
 public:
  // `world` is of host memory and must have shape.ranks() ranks; data travels in the device's memory. Collective.
  Mesh(MeshShape shape, std::unique_ptr<Communicator> world, Device device = Device::cpu);
  const MeshShape& shape() const { return shape_; }
  const Coordinates& here() const { return here_; }
  int rank() const { return world_.data->rank(); }
  int data_coordinates() const { return shape_.data * shape_.expert; }  // that read different sequences
  int data_coordinate() const { return here_.data * shape_.expert + here_.expert; }
  Axis& world() { return world_; }
  Axis& dense() { return dense_; }
  Axis& expert() { return expert_; }
  Axis& expert_data() { return expert_data_; }
  Axis& sequence() { return sequence_; }
  Axis& tensor() { return tensor_; }  // only where tensor_parallel is more than 1
  Axis& readers() { return shape_.tensor == 1 ? sequence_ : shape_.sequence == 1 ? tensor_ : readers_; }
  Axis& uncut() { return shape_.tensor == 1 ? dense_ : uncut_; }  // that share dense parameters which are cut by nobody
  Traffic traffic() const;  // of all groups together
  void settle();            // Communicator::settle of all of them

 private:
  MeshShape shape_;
  Device device_;  // of the data groups
  Coordinates here_;
  std::vector<const Axis*> axes() const;
  Axis world_, dense_, expert_, expert_data_, sequence_;
  Axis tensor_, readers_, uncut_;  // where they are groups of their own
};

}  // namespace moetrain::parallel
