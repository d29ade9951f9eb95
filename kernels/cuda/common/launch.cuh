// How every kernel here is launched: programmatic dependent launch (PDL). A kernel may begin while
// the one before it in the stream still runs, and so hide its own start (and the first loads of its
// weights) under the other's tail. Rules:
// 1. Every thread of every kernel calls WaitForPriorKernels() before it reads or writes what an
//    earlier kernel of the stream may write or read, on every path, also where it has no work: a
//    later kernel takes "the one before me is done" to mean "all before me are done".
// 2. Before that call a kernel may read only what no kernel of a step writes: weights, tables that
//    copies wrote before the step, keys and values of earlier steps.
//    SparseMla beneath a Transfer (SparseMlaParams::then_arrives) reads what came before that: a
//    Transfer lets it begin when its own wait is over.
// 3. LetNextKernelStart() says that the next kernel may be scheduled once every block has called it
//    or ended; call it as early as the next one's blocks may take shared memory and registers.
// 4. Branches (Stream::After). A kernel behind a fork or a join has the last kernel of each stream
//    as a predecessor, all of them by programmatic edges in a captured graph: it may begin when
//    every one of them has let it, and WaitForPriorKernels() waits until every one of them is done.
//    So rule 1 holds along every path of the graph, and "all before me" means all that After() put
//    before. A predecessor that is no kernel (a copy, a mailbox's word) has ended before the kernel
//    begins.
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

// Launches with the PDL attribute. `shared` above 48 KiB needs cudaFuncSetAttribute before.
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

// The same in clusters of `cluster` blocks: each runs on neighbouring multiprocessors, at one time.
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
