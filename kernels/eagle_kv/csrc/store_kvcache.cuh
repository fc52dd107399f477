// Scatter rows of k and v into a paged KV cache: k_cache[indices[row]] = k[row], and the same for v.
//
// A thread copies one unit of k, as wide as all addresses allow and 16 bytes at most, and the same unit of v. Memory is
// the limit, so what counts is bytes in flight: all three loads come first, and with 32 registers a thread a
// multiprocessor holds as many threads as it can.
//
// One text, two builds. nvcc makes the CUDA kernel; with a plain C++ compiler one thread stores row after row. NDEBUG
// must stay undefined in both: the bounds check at the write is an assert (SGLang PR 27486).
#ifdef NDEBUG
#error "store_kvcache.cuh: build without NDEBUG, it would take the slot check out"
#endif

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <assert.h>
#include <stdint.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

#ifdef __CUDACC__
#define EAGLE_KV_DEVICE __device__ __forceinline__
#else
#define EAGLE_KV_DEVICE inline
#endif

namespace eagle_kv {

constexpr int64_t kBlockThreads = 256;

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
};

template <typename Word, int kWords>
struct alignas(sizeof(Word) * kWords) Chunk {
  Word words[kWords];
};

// Store the unit that lies `at` bytes from the start of a row.
template <typename Unit, typename Index>
EAGLE_KV_DEVICE void store_unit(const StoreParams& params, int64_t row, int64_t at) {
  const Unit k = *reinterpret_cast<const Unit*>(params.k + row * params.k_stride + at);
  const Unit v = *reinterpret_cast<const Unit*>(params.v + row * params.v_stride + at);
  const int64_t slot = static_cast<const Index*>(params.indices)[row * params.indices_stride];
  assert(slot >= 0 && slot < params.size_limit);
  *reinterpret_cast<Unit*>(params.k_cache + slot * params.k_cache_stride + at) = k;
  *reinterpret_cast<Unit*>(params.v_cache + slot * params.v_cache_stride + at) = v;
}

#ifdef __CUDACC__

// A launch of this kernel may start while what the stream has before it still runs ("programmatic dependent launch"):
// it waits here, and lets the next one start. GPUs before Hopper can't, and `launch` does not ask them to.
EAGLE_KV_DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <typename Unit, typename Index>
__global__ void __launch_bounds__(kBlockThreads) store_kernel(const __grid_constant__ StoreParams params) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t at = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * static_cast<int64_t>(sizeof(Unit));
  wait_for_launch_before();
  if (row < params.num_rows && at < params.row_bytes) store_unit<Unit, Index>(params, row, at);
}

// A block is as wide as a row has units, and holds as many rows as fit; a wider row takes several blocks.
template <typename Unit, typename Index>
void launch(const StoreParams& params, DLDevice device) {
  const int64_t num_units = params.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t threads = std::min(num_units, kBlockThreads);
  const int64_t rows = kBlockThreads / threads;
  const auto blocks = [](int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); };
  int current = 0;
  cudaGetDevice(&current);
  if (current != device.device_id) cudaSetDevice(device.device_id);
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id);
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks(params.num_rows, rows), blocks(num_units, threads));
  config.blockDim = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows));
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, store_kernel<Unit, Index>, params);
  const cudaError_t status = cudaGetLastError();
  if (current != device.device_id) cudaSetDevice(current);
  if (status != cudaSuccess) throw std::runtime_error(std::string("store_cache: ") + cudaGetErrorString(status));
}

#else

template <typename Unit, typename Index>
void launch(const StoreParams& params, DLDevice) {
  for (int64_t row = 0; row < params.num_rows; ++row) {
    for (int64_t at = 0; at < params.row_bytes; at += static_cast<int64_t>(sizeof(Unit))) {
      store_unit<Unit, Index>(params, row, at);
    }
  }
}

#endif

// The widest unit that divides a row, every address and every distance between rows.
template <typename Index>
void launch_widest(const StoreParams& params, DLDevice device) {
  const int64_t addresses = reinterpret_cast<int64_t>(params.k) | reinterpret_cast<int64_t>(params.v) |
                            reinterpret_cast<int64_t>(params.k_cache) | reinterpret_cast<int64_t>(params.v_cache);
  const int64_t strides = params.k_stride | params.v_stride | params.k_cache_stride | params.v_cache_stride;
  const int64_t bits = addresses | strides | params.row_bytes;
  const int64_t unit_bytes = bits & -bits;  // the lowest bit that is set anywhere
  if (unit_bytes >= 16) return launch<Chunk<uint32_t, 4>, Index>(params, device);
  if (unit_bytes == 8) return launch<Chunk<uint32_t, 2>, Index>(params, device);
  if (unit_bytes == 4) return launch<Chunk<uint32_t, 1>, Index>(params, device);
  if (unit_bytes == 2) return launch<Chunk<uint16_t, 1>, Index>(params, device);
  return launch<Chunk<uint8_t, 1>, Index>(params, device);
}

inline std::ostream& operator<<(std::ostream& out, DLDevice device) {
  return device.device_type == kDLCPU ? out << "cpu" : out << "cuda:" << device.device_id;
}

inline std::ostream& operator<<(std::ostream& out, DLDataType type) {
  constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  if (type.code < 7) return out << kKinds[type.code] << int{type.bits};
  return out << "DLPack's type " << int{type.code} << " of " << int{type.bits} << " bits";
}

// A tensor's shape: "(3, 1024)".
inline std::ostream& operator<<(std::ostream& out, const DLTensor& tensor) {
  out << '(';
  for (int at = 0; at < tensor.ndim; ++at) out << (at == 0 ? "" : ", ") << tensor.shape[at];
  return out << ')';
}

inline bool operator==(DLDevice one, DLDevice other) {
  return one.device_type == other.device_type && one.device_id == other.device_id;
}

inline bool operator==(DLDataType one, DLDataType other) {
  return one.code == other.code && one.bits == other.bits && one.lanes == other.lanes;
}

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << "store_cache: " << ... << parts);
  throw std::invalid_argument(message.str());
}

inline void check_rows(const char* name, const DLTensor& rows, const DLTensor& k) {
  if (rows.ndim != 2) refuse(name, " has shape ", rows, ": must be 2-D, (rows, row_elems)");
  if (!(rows.dtype == k.dtype && rows.device == k.device && rows.shape[1] == k.shape[1])) {
    refuse(name, " holds rows of ", rows.shape[1], " x ", rows.dtype, " on ", rows.device, ": must match k's, ",
           k.shape[1], " x ", k.dtype, " on ", k.device);
  }
  if (rows.shape[1] > 1 && rows.strides[1] != 1) {
    refuse(name, " has stride ", rows.strides[1], " within a row: elements of a row must be adjacent");
  }
}

// What to launch. Throws std::invalid_argument where the arguments do not fit each other.
inline StoreParams checked(const DLTensor& k, const DLTensor& v, const DLTensor& k_cache, const DLTensor& v_cache,
                           const DLTensor& indices, int64_t size_limit) {
  check_rows("k", k, k);
  check_rows("v", v, k);
  check_rows("k_cache", k_cache, k);
  check_rows("v_cache", v_cache, k);
  const int64_t element_bytes = k.dtype.bits / 8;
  const int64_t row_bytes = k.shape[1] * element_bytes;
  if (row_bytes == 0 || row_bytes % 4 != 0) refuse("row of ", row_bytes, " bytes: must be a multiple of 4");
  const bool of_slots = indices.dtype.code == kDLInt && (indices.dtype.bits == 32 || indices.dtype.bits == 64);
  if (!of_slots || !(indices.device == k.device)) {
    refuse("indices are ", indices.dtype, " on ", indices.device, ": must be int32 or int64 on ", k.device);
  }
  if (indices.ndim != 1 || indices.shape[0] != k.shape[0] || v.shape[0] != k.shape[0]) {
    refuse("indices have shape ", indices, " for ", k.shape[0], " rows of k and ", v.shape[0],
           " of v: must be one slot a row");
  }
  const int64_t slots = std::min(k_cache.shape[0], v_cache.shape[0]);
  if (size_limit < 0 || size_limit > slots) {
    refuse("size_limit is ", size_limit, ": must be 0 to ", slots, ", the rows of the cache");
  }
  const auto address = [](const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; };
  // DLPack says nothing of how far apart the rows are where there is one
  const auto stride = [&](const DLTensor& rows) {
    return rows.shape[0] > 1 ? rows.strides[0] * element_bytes : row_bytes;
  };
  StoreParams params;
  params.k = address(k);
  params.v = address(v);
  params.k_cache = address(k_cache);
  params.v_cache = address(v_cache);
  params.indices = address(indices);
  params.k_stride = stride(k);
  params.v_stride = stride(v);
  params.k_cache_stride = stride(k_cache);
  params.v_cache_stride = stride(v_cache);
  params.indices_stride = indices.strides[0];
  params.num_rows = k.shape[0];
  params.row_bytes = row_bytes;
  params.size_limit = size_limit == 0 ? slots : size_limit;
  return params;
}

[[noreturn]] inline void refuse_call() { refuse("takes five tensors and an integer"); }

inline const DLTensor& tensor(const TVMFFIAny& argument) {
  if (argument.type_index == kTVMFFIDLTensorPtr) return *static_cast<const DLTensor*>(argument.v_ptr);
  if (argument.type_index == kTVMFFITensor) return *TVMFFITensorGetDLTensorPtr(argument.v_obj);
  refuse_call();
}

inline int64_t integer(const TVMFFIAny& argument) {
  if (argument.type_index != kTVMFFIInt) refuse_call();
  return argument.v_int64;
}

}  // namespace eagle_kv

// store_cache(k, v, k_cache, v_cache, indices, size_limit), by tvm-ffi's C calling convention: its C++ one takes many
// seconds to compile.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_store_cache(void*, const TVMFFIAny* args, int32_t num_args,
                                                        TVMFFIAny* result) {
  using namespace eagle_kv;
  try {
    if (num_args != 6) refuse_call();
    const DLTensor& k = tensor(args[0]);
    const StoreParams params =
        checked(k, tensor(args[1]), tensor(args[2]), tensor(args[3]), tensor(args[4]), integer(args[5]));
    const bool wide = tensor(args[4]).dtype.bits == 64;
    if (params.num_rows != 0) (wide ? launch_widest<int64_t> : launch_widest<int32_t>)(params, k.device);
  } catch (const std::invalid_argument& error) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", error.what());
    return -1;
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
    return -1;
  }
  result->type_index = kTVMFFINone;
  result->zero_padding = 0;
  result->v_int64 = 0;
  return 0;
}
