// Compile-time checks that the operators' contracts compile under nvcc, for host and device, with
// the layout that the C++ side asserts.
#include "kernels/params_check.h"

namespace sluice::kernels {
namespace {

// Params travel to a kernel by value. The largest must fit the 4 KiB argument space that every
// supported GPU has, with room to spare.
static_assert(sizeof(AttentionParams) <= 4096 && sizeof(SampleParams) <= 4096, "kernel arguments");

}  // namespace
}  // namespace sluice::kernels
