#include "src/device/cpu/host_stream.h"

#include <cstring>

#include "src/base/failpoint.h"

namespace sluice {

void HostStream::Copy(void* target, const void* source, size_t bytes) {
  struct Work {
    void* target;
    const void* source;
    size_t bytes;
  };
  Enqueue<Work>([](const Work& w, CpuTeam*) { std::memcpy(w.target, w.source, w.bytes); },
                Work{target, source, bytes}, {"copy", TraceSlice::Kind::kCopy, bytes});
}

void HostStream::CopyBatch(const CopyOp* ops, size_t count) {
  struct Work {
    const CopyOp* ops;
    size_t count;
  };
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += ops[i].bytes;
  Enqueue<Work>(
      [](const Work& w, CpuTeam*) {
        SLUICE_FAILPOINT_PAUSE(kKvCopy);
        for (size_t i = 0; i < w.count; ++i) {
          std::memcpy(w.ops[i].target, w.ops[i].source, w.ops[i].bytes);
        }
      },
      Work{ops, count}, {"copy batch", TraceSlice::Kind::kCopy, bytes});
}

void HostStream::Fill(void* target, uint8_t value, size_t bytes) {
  struct Work {
    void* target;
    size_t bytes;
    uint8_t value;
  };
  Enqueue<Work>([](const Work& w, CpuTeam*) { std::memset(w.target, w.value, w.bytes); },
                Work{target, bytes, value}, {"fill", TraceSlice::Kind::kFill, bytes});
}

}  // namespace sluice
