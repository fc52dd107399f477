// Scatter rows of k and v into a paged KV cache: cache[indices[row]] = row, one warp a row.
//
// One text, two builds. nvcc makes the CUDA kernel; a plain C++ compiler makes the same kernel body run in a loop over
// blocks and threads. NDEBUG must stay undefined in both: the bounds check at the write is an assert (SGLang PR 27486).
#ifdef NDEBUG
#error "store_kvcache.cuh: build without NDEBUG, it would take the slot check out"
#endif

#include <tvm/ffi/c_api.h>

#include <assert.h>
#include <stdint.h>

#ifdef __CUDACC__
#define EAGLE_KV_DEVICE __device__ __forceinline__
#else
#define EAGLE_KV_DEVICE inline
#endif

namespace eagle_kv {

constexpr int kWarpThreads = 32;
constexpr int kWarpsPerBlock = 8;
constexpr int kBlockThreads = kWarpThreads * kWarpsPerBlock;

// Strides are in bytes, but for indices_stride, which is in elements.
struct StoreParams {
  const char* k;
  const char* v;
  char* k_cache;
  char* v_cache;
  const void* indices;
  int64_t k_stride;
  int64_t v_stride;
  int64_t k_cache_stride;
  int64_t v_cache_stride;
  int64_t indices_stride;
  int64_t num_rows;
  int64_t row_bytes;
  int64_t size_limit;
  int64_t index_bytes;
};

template <typename Word, int kWords>
struct alignas(sizeof(Word) * kWords) Chunk {
  Word words[kWords];
};

template <typename Unit>
EAGLE_KV_DEVICE void copy_units(char* to, const char* from, int64_t num_units, int lane) {
  for (int64_t unit = lane; unit < num_units; unit += kWarpThreads) {
    reinterpret_cast<Unit*>(to)[unit] = reinterpret_cast<const Unit*>(from)[unit];
  }
}

template <typename Unit>
EAGLE_KV_DEVICE void store_thread(const StoreParams& params, int64_t block, int thread) {
  const int64_t row = block * kWarpsPerBlock + thread / kWarpThreads;
  if (row >= params.num_rows) return;
  const int64_t at = row * params.indices_stride;
  const int64_t slot = params.index_bytes == 8 ? static_cast<const int64_t*>(params.indices)[at]
                                               : static_cast<const int32_t*>(params.indices)[at];
  assert(slot >= 0 && slot < params.size_limit);
  const int64_t num_units = params.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int lane = thread % kWarpThreads;
  copy_units<Unit>(params.k_cache + slot * params.k_cache_stride, params.k + row * params.k_stride, num_units, lane);
  copy_units<Unit>(params.v_cache + slot * params.v_cache_stride, params.v + row * params.v_stride, num_units, lane);
}

#ifdef __CUDACC__

template <typename Unit>
__global__ void __launch_bounds__(kBlockThreads) store_kernel(const __grid_constant__ StoreParams params) {
  store_thread<Unit>(params, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <typename Unit>
const char* launch(const StoreParams& params, int64_t num_blocks, int64_t stream) {
  store_kernel<Unit><<<static_cast<unsigned>(num_blocks), kBlockThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      params);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

#else

template <typename Unit>
const char* launch(const StoreParams& params, int64_t num_blocks, int64_t) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int thread = 0; thread < kBlockThreads; ++thread) store_thread<Unit>(params, block, thread);
  }
  return nullptr;
}

#endif

inline const char* launch_for_unit(const StoreParams& params, int64_t unit_bytes, int64_t stream) {
  const int64_t num_blocks = (params.num_rows + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (num_blocks == 0) return nullptr;
  switch (unit_bytes) {
    case 16:
      return launch<Chunk<uint32_t, 4>>(params, num_blocks, stream);
    case 8:
      return launch<Chunk<uint32_t, 2>>(params, num_blocks, stream);
    case 4:
      return launch<Chunk<uint32_t, 1>>(params, num_blocks, stream);
    case 2:
      return launch<Chunk<uint16_t, 1>>(params, num_blocks, stream);
    case 1:
      return launch<Chunk<uint8_t, 1>>(params, num_blocks, stream);
    default:
      return "unit_bytes must be 1, 2, 4, 8 or 16";
  }
}

}  // namespace eagle_kv

// The C calling convention of tvm-ffi, which needs one header that compiles in no time; all arguments are integers.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_store_cache(void*, const TVMFFIAny* args, int32_t num_args,
                                                        TVMFFIAny* result) {
  constexpr int32_t kNumArgs = 16;
  if (num_args != kNumArgs) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "store_cache: takes 16 integers");
    return -1;
  }
  int64_t value[kNumArgs];
  for (int32_t i = 0; i < kNumArgs; ++i) value[i] = args[i].v_int64;

  eagle_kv::StoreParams params;
  params.k = reinterpret_cast<const char*>(value[0]);
  params.v = reinterpret_cast<const char*>(value[1]);
  params.k_cache = reinterpret_cast<char*>(value[2]);
  params.v_cache = reinterpret_cast<char*>(value[3]);
  params.indices = reinterpret_cast<const void*>(value[4]);
  params.k_stride = value[5];
  params.v_stride = value[6];
  params.k_cache_stride = value[7];
  params.v_cache_stride = value[8];
  params.indices_stride = value[9];
  params.num_rows = value[10];
  params.row_bytes = value[11];
  params.size_limit = value[12];
  params.index_bytes = value[13];
  const char* problem = eagle_kv::launch_for_unit(params, value[14], value[15]);
  if (problem != nullptr) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", problem);
    return -1;
  }
  result->type_index = kTVMFFINone;
  result->zero_padding = 0;
  result->v_int64 = 0;
  return 0;
}
