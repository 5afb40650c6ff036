// lora.h -- adapters: which matrices get one, its factors as parameters of the table, and weights with their adapters merged in.
//
//   W x becomes W x + scale B A drop(x):  A (rank, I) fresh as Init::fan_in, B (O, rank) fresh 0
//   experts (E, O, I):                    A (E, rank, I), or (rank, I) with shared_a, summed over all who used it; B (E, O, rank)
//   scale = alpha / rank, with rslora alpha / sqrt(rank)
// The factors of <module>.weight are <module>.lora_A.weight and <module>.lora_B.weight, trained like any other parameter.
#pragma once
#include "core/params.h"
#include "core/weight_pieces.h"

namespace moetrain::core {

// Freezes what the job does not train and declares its adapters. Adapters come after all else, so that indices of a model's own
// parameters are the same with and without. An Error where a pattern or target matches nothing, or nothing is left to train.
void choose_trained(const Config& config, ParamTable& table);

bool multiplies(const Param& p);  // a matrix: not one that is read as rows, nor a norm, gate, convolution or query

// `source` with W + scale B A in place of W, where `table` has an adapter; its factors are read from `source` too.
WeightSource merged(const WeightSource& source, const ParamTable& table);

}  // namespace moetrain::core
