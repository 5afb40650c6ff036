// export.cpp -- a checkpoint becomes a Hugging Face folder.
#include "core/export.h"

#include <filesystem>

#include "app/commands.h"
#include "core/checkpoint.h"
#include "core/together.h"

namespace moetrain::app {

ExitCode export_to(const ExportArguments& a, parallel::Communicator& control) {
  std::string checkpoint;
  core::together(control, [&] {
    if (!std::filesystem::exists(a.checkpoint)) throw Error(a.checkpoint + ": no such checkpoint", ExitCode::bad_job);
    checkpoint = core::checkpoint_at(a.checkpoint);
    if (checkpoint.empty()) throw Error(a.checkpoint + ": holds no checkpoint");
  });
  core::export_folder(control, checkpoint, a.out);
  return ExitCode::done;
}

}  // namespace moetrain::app
