#include "src/device/trace.h"

#include "absl/strings/str_replace.h"

namespace sluice {

const char* SliceKindName(TraceSlice::Kind kind) {
  switch (kind) {
    case TraceSlice::Kind::kKernel:
      return "kernel";
    case TraceSlice::Kind::kCopy:
      return "copy";
    case TraceSlice::Kind::kFill:
      return "fill";
  }
  return "";
}

std::string ShortKernelName(const std::string& signature) {
  std::string name = absl::StrReplaceAll(signature, {{"(anonymous namespace)::", ""},
                                                     {"sluice::kernels::cuda::", ""},
                                                     {"sluice::kernels::", ""},
                                                     {"sluice::", ""}});
  // The arguments begin at the last parenthesis that is not inside template arguments.
  int depth = 0;
  size_t end = name.size();
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) {
      end = i;
      break;
    }
  }
  name.resize(end);
  constexpr size_t kVoid = 5;
  return name.compare(0, kVoid, "void ") == 0 ? name.substr(kVoid) : name;
}

}  // namespace sluice
