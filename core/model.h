// model.h -- embedding, blocks, head: the whole forward and backward of one micro-batch, gathering and releasing weights around
// each block.
#pragma once
#include <vector>

#include "core/block.h"
#include "core/head.h"
#include "core/layout.h"

namespace moetrain::core {

class Model {
 public:
  // Declares every parameter. tensor_ranks: that cut matrices between them.
  Model(const ModelConfig& model, ParamTable& table, int tensor_ranks = 1);
  // Adds the losses and balance counts of the micro-batch. In evaluate mode nothing is kept; otherwise backward must follow.
  // logits (T, V) of any floating type: also written when present. held: the decisions of PassMode::held.
  void forward(Pass& pass, const Layout& layout, Tensor logits = {}, std::span<const Block::Decisions> held = {});
  void backward(Pass& pass, const Layout& layout);
  int moe_layers() const { return moe_layers_; }
  std::vector<Block::Decisions> decisions() const;     // of each layer, between forward and backward
  std::vector<int> router_biases() const;              // parameter of each MoE layer, in order

 private:
  struct LayerState {
    std::size_t mark = 0;         // of pass.kept before the layer took anything
    ConstTensor p_in;
    Tensor p_out;
    Block::Decisions decisions;
    Block::Kept kept;
  };
  // The weights of layers from l on, in the order of a pass, until they are a bucket full: one layer at least. Past the last
  // layer comes the head.
  void prefetch(Pass& pass, const Layout& layout, std::size_t l) const;
  void prefetch_below(Pass& pass, const Layout& layout, std::size_t l, std::size_t lowest) const;
  void gather(Pass& pass, const std::vector<int>& units) const {
    for (const int u : units) pass.params.gather(u);
  }
  void release(Pass& pass, const std::vector<int>& units) const {
    for (const int u : units) pass.params.release(u);
  }
  void reduce(Pass& pass, const std::vector<int>& units) const;
  void embed(Pass& pass, Tensor p) const;
  void embed_backward(Pass& pass, ConstTensor dp, Tensor dtable) const;
  ConstTensor words_here(Pass& pass) const;  // the slice's tokens among this rank's words, in scratch
  std::size_t lowest_trained(const parallel::ShardedParams& params, const Layout& layout) const;

  std::int64_t D_;
  bool tied_;
  int moe_layers_ = 0;
  int embedding_;
  std::vector<Block> blocks_;
  std::unique_ptr<Head> head_;
  // of the micro-batch between forward and backward
  Bank bank_;
  std::vector<LayerState> layers_;
  Head::Kept head_kept_;
  std::size_t head_mark_ = 0, start_mark_ = 0;
};

ParamTable parameters_of(const ModelConfig& model);  // what a Model declares
ParamTable parameters_of(const Config& config);      // and the adapters of a job, frozen and trained as it says

}  // namespace moetrain::core
