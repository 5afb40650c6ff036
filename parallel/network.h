// network.h -- how long messages of a dry run travel: links between ranks of a host and between hosts, and their clock.
//
// Ranks [k h, (k + 1) h) share a host, and each has a way of its own out of it. In a group of n ranks, m of them on this host, take
//   a gather of b bytes from each, or a scatter of b to each   max( (n - 1) b / near, (n - m) b / (m far) )    what other hosts
//                                                              have comes in once a host, shared over its ways
//   a sum for all of b bytes                                   twice as long as a gather of b / n
//   an exchange                                                max( b / near, c / far ), b and c the bytes of this rank with its
//                                                              host and with others, out or in, whichever is more
// and a latency for each of ceil(log2 n) stages, an exchange one: that of the slower kind of link which the group has.
#pragma once
#include "memory/timeline.h"

namespace moetrain::parallel {

struct Link {
  double bytes_per_s = 0, latency_s = 0;  // one way
};
struct Network {
  Link near, far;
  int ranks_a_host = 1;
  Timeline* timeline = nullptr;
};

}  // namespace moetrain::parallel
