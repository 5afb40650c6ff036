// together.cpp -- who failed first, and his words to everyone.
#include "core/together.h"

namespace moetrain::core {

void agree(parallel::Communicator& control, const Error* mine) {
  std::int64_t first = mine ? control.rank() : control.size();
  control.all_reduce(Tensor(&first, DType::i64, {1}), parallel::Reduction::min);
  if (first == control.size()) return;
  std::string what = mine && first == control.rank() ? mine->what() : "";
  std::int64_t head[2] = {std::int64_t(what.size()), mine ? std::int64_t(mine->code()) : 0};
  control.broadcast(head, sizeof head, int(first));
  what.resize(std::size_t(head[0]));
  control.broadcast(what.data(), head[0], int(first));
  throw AgreedError(int(first), what, ExitCode(head[1]));
}

}  // namespace moetrain::core
