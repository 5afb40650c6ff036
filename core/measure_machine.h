// measure_machine.h -- a machine's description from steps that it trains (moetrain bench --machine).
//
// Two small models, one with dense and one with sparse attention, are trained a few steps in each type that the device has, with a
// clock around every operator. A dry step of the same models says what the operators did, so that
//
//   rate(kind, pass, type) = flops / (seconds - calls launch)   of all operators of the kind together, the least of some steps
//   memory                 = bytes / seconds                    of the optimizer, and of operators along rows
//   turn(pass)                                                  from the two models' numbers of KDA heads: what grows with rows
//                                                               alone; 0 on CPUs
// Links are measured between the ranks there are, all at once; of one rank they are those of copies within its memory.
#pragma once
#include <functional>

#include "core/machine.h"
#include "parallel/communicator.h"

namespace moetrain::core {

// Collective over `world`, which is of host memory. local_ranks: of this host. say: told what is measured now.
Machine measure_machine(const std::string& name, Device device, parallel::Communicator& world, int local_ranks,
                        const std::function<void(const std::string&)>& say);

}  // namespace moetrain::core
