// Every kernel here is launched with programmatic dependent launch (PDL): a kernel may begin
// while the one before it in the stream still runs, and so hide its own start (and the first
// loads of its weights) under the other's tail. The rules:
// 1. Every thread of every kernel calls WaitForPriorKernels() before it reads or writes anything
//    that an earlier kernel of the stream may write or read. This holds on every path, even where
//    the thread has no work: a later kernel takes "the one before me is done" to mean "all before
//    me are done".
// 2. Before that call a kernel may read only data that no kernel of a step writes: weights,
//    tables that copies wrote before the step, and keys and values of earlier steps. SparseMla
//    beneath a Transfer or a TakeRing (SparseMlaParams::then_arrives) may also read data that was
//    complete before that, because those let it begin only when their own wait is over.
// 3. LetNextKernelStart() allows the next kernel to be scheduled once every block has called it
//    or ended. Call it as soon as the next kernel's blocks may take shared memory and registers.
// 4. Branches (Stream::After): a kernel behind a fork or a join has the last kernel of each
//    stream as a predecessor, all of them by programmatic edges in a captured graph. It may begin
//    when every predecessor has let it, and WaitForPriorKernels() waits until every one of them
//    is done. So rule 1 holds along every path of the graph, and "all before me" means everything
//    that After() put before. A predecessor that is not a kernel (a copy, a mailbox's word) has
//    ended before the kernel begins.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace sluice::kernels::cuda {

__device__ __forceinline__ void WaitForPriorKernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Launches with the PDL attribute. REQUIRES: the caller has called cudaFuncSetAttribute if
// `shared` exceeds 48 KiB.
template <typename... Params, typename... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                         cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

// As above, but in clusters of `cluster` blocks: the blocks of a cluster run at one time on
// neighbouring multiprocessors.
template <typename... Params, typename... Args>
cudaError_t LaunchClusters(void (*kernel)(Params...), dim3 grid, dim3 block, dim3 cluster,
                           size_t shared, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace sluice::kernels::cuda
