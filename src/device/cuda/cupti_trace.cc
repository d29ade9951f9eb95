#include "src/device/cuda/cupti_trace.h"

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Paths where a toolkit has the library, if the loader does not find it by name.
constexpr std::array kLibraries = {"libcupti.so.13", "/usr/local/cuda/lib64/libcupti.so.13",
                                   "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13"};
constexpr std::array kKinds = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                               CUPTI_ACTIVITY_KIND_MEMSET};
constexpr size_t kBufferBytes = size_t{8} << 20;  // room for some 40,000 records
constexpr size_t kBufferAlignment = 8;

// The functions that are used, by name.
struct Cupti {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks;
  decltype(&cuptiActivityEnable) enable;
  decltype(&cuptiActivityDisable) disable;
  decltype(&cuptiActivityFlushAll) flush_all;
  decltype(&cuptiActivityGetNextRecord) next_record;
  decltype(&cuptiGetResultString) result_string;

  absl::Status Check(CUptiResult result, const char* what) const {
    if (result == CUPTI_SUCCESS) return absl::OkStatus();
    const char* text = nullptr;
    result_string(result, &text);
    return absl::FailedPreconditionError(
        absl::StrCat("CUPTI: ", what, ": ", text != nullptr ? text : "unknown error"));
  }
};

absl::StatusOr<Cupti> LoadCupti() {
  void* library = nullptr;
  std::string tried;
  for (const char* name : kLibraries) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    absl::StrAppend(&tried, tried.empty() ? "" : ", ", name);
  }
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no CUPTI, which a trace of the GPU needs (it comes with the CUDA Toolkit); tried ",
        tried));
  }
  Cupti cupti{};
  bool complete = true;
  const auto load = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    complete = complete && *function != nullptr;
  };
  load(&cupti.register_callbacks, "cuptiActivityRegisterCallbacks");
  load(&cupti.enable, "cuptiActivityEnable");
  load(&cupti.disable, "cuptiActivityDisable");
  load(&cupti.flush_all, "cuptiActivityFlushAll");
  load(&cupti.next_record, "cuptiActivityGetNextRecord");
  load(&cupti.result_string, "cuptiGetResultString");
  if (!complete) return absl::FailedPreconditionError("this CUPTI lacks a function of CUDA 13's");
  return cupti;
}

std::string KernelName(const char* mangled) {
  if (mangled == nullptr) return "kernel";
  int status = 0;
  char* const name = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string out = ShortKernelName(status == 0 ? name : mangled);
  std::free(name);
  return out;
}

const char* CopyName(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "copy to the device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "copy to the host";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
      return "copy on the device";
    default:
      return "copy";
  }
}

// Start and end are CLOCK_REALTIME in nanoseconds, as absl::Now() is.
template <typename Record>
TraceSlice SliceOf(TraceSlice::Kind kind, std::string name, const Record& record) {
  TraceSlice slice;
  slice.kind = kind;
  slice.name = std::move(name);
  slice.stream = record.streamId;
  slice.begin = absl::FromUnixNanos(static_cast<int64_t>(record.start));
  slice.end = absl::FromUnixNanos(static_cast<int64_t>(record.end));
  // All slices of a graph share the correlation of the graph's launch.
  slice.launch = record.graphId != 0 ? record.correlationId : 0;
  return slice;
}

// CUPTI's callbacks take no context, so they fill state of the process, which lives as long as the
// process: CUPTI is never unloaded.
class Collector {
 public:
  static Collector& Get() {
    static auto* collector = new Collector;
    return *collector;
  }

  absl::Status Start() {
    absl::MutexLock lock(&mutex_);
    if (on_) return absl::FailedPreconditionError("the device is traced already");
    if (!cupti_.has_value()) {
      SLUICE_ASSIGN_OR_RETURN(const Cupti cupti, LoadCupti());
      SLUICE_RETURN_IF_ERROR(
          cupti.Check(cupti.register_callbacks(&NewBuffer, &TakeBuffer), "callbacks"));
      cupti_ = cupti;
    }
    for (const CUpti_ActivityKind kind : kKinds) {
      absl::Status enabled = cupti_->Check(cupti_->enable(kind), "records cannot be enabled");
      if (enabled.ok()) continue;
      for (const CUpti_ActivityKind other : kKinds) cupti_->disable(other);
      return enabled;
    }
    slices_.clear();
    on_ = true;
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<TraceSlice>> Stop() {
    {
      absl::MutexLock lock(&mutex_);
      if (!on_) return std::vector<TraceSlice>();
      on_ = false;
    }
    // The lock is not held here: flushing calls TakeBuffer.
    absl::Status status =
        cupti_->Check(cupti_->flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "flush");
    for (const CUpti_ActivityKind kind : kKinds) {
      status.Update(cupti_->Check(cupti_->disable(kind), "records cannot be disabled"));
    }
    absl::MutexLock lock(&mutex_);
    std::vector<TraceSlice> slices = std::exchange(slices_, {});
    if (!status.ok()) return status;
    return slices;
  }

 private:
  static void CUPTIAPI NewBuffer(uint8_t** buffer, size_t* bytes, size_t* max_records) {
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
    *bytes = *buffer != nullptr ? kBufferBytes : 0;
    *max_records = 0;  // as many as fit
  }
  static void CUPTIAPI TakeBuffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
    Get().Read(buffer, valid);
    std::free(buffer);
  }

  void Read(uint8_t* buffer, size_t valid) {
    absl::MutexLock lock(&mutex_);
    CUpti_Activity* record = nullptr;
    while (cupti_->next_record(buffer, valid, &record) == CUPTI_SUCCESS) Add(*record);
  }

  void Add(const CUpti_Activity& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (record.kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto& kernel = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
      slices_.push_back(SliceOf(TraceSlice::Kind::kKernel, KernelName(kernel.name), kernel));
    } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto& copy = reinterpret_cast<const CUpti_ActivityMemcpy6&>(record);
      slices_.push_back(SliceOf(TraceSlice::Kind::kCopy, CopyName(copy.copyKind), copy));
      slices_.back().bytes = static_cast<int64_t>(copy.bytes);
    } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto& fill = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
      slices_.push_back(SliceOf(TraceSlice::Kind::kFill, "fill", fill));
      slices_.back().bytes = static_cast<int64_t>(fill.bytes);
    }
  }

  absl::Mutex mutex_;
  bool on_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Cupti> cupti_;  // set once, before any record comes
  std::vector<TraceSlice> slices_ ABSL_GUARDED_BY(mutex_);
};

class CuptiTrace : public DeviceTrace {
 public:
  ~CuptiTrace() override { Collector::Get().Stop().IgnoreError(); }
  absl::StatusOr<std::vector<TraceSlice>> Stop() override { return Collector::Get().Stop(); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceTrace>> StartCuptiTrace() {
  SLUICE_RETURN_IF_ERROR(Collector::Get().Start());
  return std::make_unique<CuptiTrace>();
}

}  // namespace sluice
