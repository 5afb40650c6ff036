// export.cpp -- a checkpoint becomes a Hugging Face folder, or its adapters become one of the peft library.
#include "core/export.h"

#include <filesystem>

#include "app/commands.h"
#include "core/checkpoint.h"
#include "core/export_peft.h"
#include "core/together.h"

namespace moetrain::app {

ExitCode export_to(const ExportArguments& a, parallel::Communicator& control) {
  std::string checkpoint;
  core::together(control, [&] {
    if (!std::filesystem::exists(a.checkpoint)) throw Error(a.checkpoint + ": no such checkpoint", ExitCode::bad_job);
    checkpoint = core::checkpoint_at(a.checkpoint);
    if (checkpoint.empty()) throw Error(a.checkpoint + ": holds no checkpoint");
  });
  if (a.to == "hf")
    core::export_folder(control, checkpoint, a.out, {.merge = a.merge});
  else
    core::export_adapters(control, checkpoint, a.out,
                          {a.experts == "fused" ? core::ExpertLayout::fused : core::ExpertLayout::separate, a.base});
  return ExitCode::done;
}

}  // namespace moetrain::app
