// Products with many rows by cuBLASLt, called directly: a plan holds the shape and an algorithm chosen once.
//
// cuBLASLt is opened at run time and not linked: the library then builds and opens where cuBLAS is not installed, and in
// a process with torch it is torch's copy that is used (dlopen goes by the soname of what is loaded), not a second one of
// another version. Its C interface is declared here as far as it is used; it has been the same since CUDA 11.

#include "linear_plan.h"

#include <dlfcn.h>

#include <new>

#include "check.h"
#include "launch.h"

namespace tl::cuda {
namespace {

// ---- what is used of cublasLt.h

using Handle = void *;
using Object = void *;  // a descriptor, layout or preference
using Status = int;     // 0 is success

struct Algorithm {
  uint64_t data[8];
};
struct Choice {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Choice) == 64 + 8 + 4 + 4 + 16, "as in cublasLt.h");

enum : int { kFp32 = 0, kBf16 = 14 };                                             // cudaDataType_t
enum : int { kComputeFp32 = 68 };                                                 // cublasComputeType_t
enum : int { kTransposed = 1 };                                                   // cublasOperation_t
enum : int { kEpilogueBias = 4 };                                                 // cublasLtEpilogue_t
enum : int { kLayoutColumns = 3 };                                                // cublasLtMatrixLayoutAttribute_t
enum : int { kProductTransposeA = 3, kProductEpilogue = 7, kProductBias = 8 };    // cublasLtMatmulDescAttributes_t
enum : int { kMostWorkspace = 1, kReductions = 3, kAlignmentA = 5, kAlignmentD = 8 };  // cublasLtMatmulPreference..
// Split sums, if any, are added in fp32 from the workspace: not rounded to bf16 on the way, not in any order.
constexpr uint32_t kReductionsAllowed = 2;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
constexpr uint32_t kAlignment = 16;         // bytes, of matrices
constexpr uintptr_t kWorkspaceAlignment = 256;

struct Cublas {
  Handle handle = nullptr;  // made at the first plan, and never destroyed
  Status (*create)(Handle *);
  Status (*product_create)(Object *, int compute, int scale);
  Status (*product_set)(Object, int attribute, const void *value, size_t bytes);
  Status (*product_destroy)(Object);
  Status (*layout_create)(Object *, int type, uint64_t rows, uint64_t columns, int64_t stride);
  Status (*layout_set)(Object, int attribute, const void *value, size_t bytes);
  Status (*layout_destroy)(Object);
  Status (*preference_create)(Object *);
  Status (*preference_set)(Object, int attribute, const void *value, size_t bytes);
  Status (*preference_destroy)(Object);
  Status (*choose)(Handle, Object product, Object a, Object b, Object c, Object d, Object preference, int wanted,
                   Choice *choices, int *found);
  Status (*multiply)(Handle, Object product, const void *alpha, const void *a, Object a_layout, const void *b,
                     Object b_layout, const void *beta, const void *c, Object c_layout, void *d, Object d_layout,
                     const Algorithm *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream);
};

void *open_cublas() {
  constexpr const char *names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW})  // what the process has comes before what it could have
    for (const char *name : names)
      if (void *const library = dlopen(name, mode)) return library;
  return nullptr;
}

template <typename Function>
bool find(void *library, const char *name, Function &function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// A handle of NULL: cuBLASLt cannot be had.
Cublas load_cublas() {
  Cublas lt = {};
  void *const library = open_cublas();
  if (library == nullptr) return lt;
  const bool complete = find(library, "cublasLtCreate", lt.create) &&
                        find(library, "cublasLtMatmulDescCreate", lt.product_create) &&
                        find(library, "cublasLtMatmulDescSetAttribute", lt.product_set) &&
                        find(library, "cublasLtMatmulDescDestroy", lt.product_destroy) &&
                        find(library, "cublasLtMatrixLayoutCreate", lt.layout_create) &&
                        find(library, "cublasLtMatrixLayoutSetAttribute", lt.layout_set) &&
                        find(library, "cublasLtMatrixLayoutDestroy", lt.layout_destroy) &&
                        find(library, "cublasLtMatmulPreferenceCreate", lt.preference_create) &&
                        find(library, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set) &&
                        find(library, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy) &&
                        find(library, "cublasLtMatmulAlgoGetHeuristic", lt.choose) &&
                        find(library, "cublasLtMatmul", lt.multiply);
  if (!complete || lt.create(&lt.handle) != 0) lt.handle = nullptr;
  return lt;
}

const Cublas &cublas() {
  static const Cublas loaded = load_cublas();
  return loaded;
}

}  // namespace
}  // namespace tl::cuda

// Row-major matrices are column-major ones transposed: out^T[columns, rows] = weight[columns, inner] * x^T[inner, rows],
// where cuBLASLt sees the weight as a matrix [inner, columns] to be transposed.
struct tl_cuda_linear_plan {
  tl_cuda_linear_plan_args args;
  void *product = nullptr, *weight = nullptr, *x = nullptr, *out = nullptr;
  tl::cuda::Algorithm algorithm = {};

  bool describe(const tl::cuda::Cublas &lt) {
    using namespace tl::cuda;
    const int transposed = kTransposed, epilogue = kEpilogueBias;
    const int out_type = args.flags & TL_CUDA_FP32_OUT ? kFp32 : kBf16;
    if (lt.product_create(&product, kComputeFp32, kFp32) != 0) return false;
    if (lt.product_set(product, kProductTransposeA, &transposed, sizeof transposed) != 0) return false;
    if (args.flags & TL_CUDA_BIAS) {
      // Some versions want a bias before they choose; none looks at it then.
      void *const somewhere = reinterpret_cast<void *>(uintptr_t{256});
      if (lt.product_set(product, kProductEpilogue, &epilogue, sizeof epilogue) != 0) return false;
      if (lt.product_set(product, kProductBias, &somewhere, sizeof somewhere) != 0) return false;
    }
    return lt.layout_create(&weight, kBf16, args.inner, args.columns, args.inner) == 0 &&
           lt.layout_create(&x, kBf16, args.inner, args.rows, args.inner) == 0 &&
           lt.layout_create(&out, out_type, args.columns, args.rows, args.columns) == 0;
  }

  bool choose(const tl::cuda::Cublas &lt) {
    using namespace tl::cuda;
    Object preference = nullptr;
    if (lt.preference_create(&preference) != 0) return false;
    const uint64_t workspace = args.workspace_bytes;
    bool ok = lt.preference_set(preference, kMostWorkspace, &workspace, sizeof workspace) == 0 &&
              lt.preference_set(preference, kReductions, &kReductionsAllowed, sizeof kReductionsAllowed) == 0;
    for (int matrix = kAlignmentA; matrix <= kAlignmentD; ++matrix)
      ok = ok && lt.preference_set(preference, matrix, &kAlignment, sizeof kAlignment) == 0;
    Choice choice = {};
    int found = 0;
    ok = ok && lt.choose(lt.handle, product, weight, x, out, out, preference, 1, &choice, &found) == 0 && found == 1 &&
         choice.state == 0;
    lt.preference_destroy(preference);
    algorithm = choice.algorithm;
    return ok;
  }

  // The layouts speak of as many rows as the call has.
  bool resize(const tl::cuda::Cublas &lt, uint64_t rows) {
    return lt.layout_set(x, tl::cuda::kLayoutColumns, &rows, sizeof rows) == 0 &&
           lt.layout_set(out, tl::cuda::kLayoutColumns, &rows, sizeof rows) == 0;
  }
};

namespace tl::cuda {

bool fits_plan(const tl_cuda_linear_args &args, const tl_cuda_linear_plan &plan) {
  const uint32_t flags = (args.flags & TL_CUDA_FP32_OUT) | (args.bias != nullptr ? TL_CUDA_BIAS : 0u);
  return args.rows <= plan.args.rows && args.columns == plan.args.columns && args.inner == plan.args.inner &&
         flags == plan.args.flags;
}

tl_status run_plan(const tl_cuda_linear_args &args, void *stream) {
  tl_cuda_linear_plan &plan = *args.plan;
  const size_t workspace_bytes = static_cast<size_t>(plan.args.workspace_bytes);
  if (workspace_bytes > 0 && args.workspace == nullptr) return TL_ERROR_NULL;
  if (reinterpret_cast<uintptr_t>(args.workspace) % kWorkspaceAlignment != 0) return TL_ERROR_ALIGNMENT;
  const Cublas &lt = cublas();
  if (!plan.resize(lt, args.rows)) return TL_ERROR_CUBLAS;
  if (args.bias != nullptr && lt.product_set(plan.product, kProductBias, &args.bias, sizeof args.bias) != 0)
    return TL_ERROR_CUBLAS;
  const float one = 1.0f, zero = 0.0f;
  const Status status = lt.multiply(lt.handle, plan.product, &one, args.weight, plan.weight, args.x, plan.x, &zero,
                                    args.out, plan.out, args.out, plan.out, &plan.algorithm, args.workspace,
                                    workspace_bytes, static_cast<cudaStream_t>(stream));
  if (status != 0) return TL_ERROR_CUBLAS;
  return TL_OK;
}

}  // namespace tl::cuda

using namespace tl::cuda;

extern "C" {

tl_status tl_cuda_linear_plan_create(const tl_cuda_linear_plan_args *args, tl_cuda_linear_plan **out) {
  ArgsCheck check(args, TL_CUDA_FP32_OUT | TL_CUDA_BIAS);
  if (!check.present(out).ok()) return check.status();
  const uint32_t both = TL_CUDA_FP32_OUT | TL_CUDA_BIAS;
  check.count(args->rows, 1).count(args->columns, 1).count(args->inner, 1).count(args->workspace_bytes, 0);
  if (!check.fits(args->columns % 8 == 0 && args->inner % 8 == 0 && (args->flags & both) != both).ok())
    return check.status();
  const Cublas &lt = cublas();
  if (lt.handle == nullptr) return TL_ERROR_CUBLAS;
  tl_cuda_linear_plan *const plan = new (std::nothrow) tl_cuda_linear_plan{*args};
  if (plan == nullptr) return TL_ERROR_SYSTEM;
  if (!plan->describe(lt) || !plan->choose(lt)) {
    tl_cuda_linear_plan_destroy(plan);
    return TL_ERROR_CUBLAS;
  }
  *out = plan;
  return TL_OK;
}

void tl_cuda_linear_plan_destroy(tl_cuda_linear_plan *plan) {
  if (plan == nullptr) return;
  const Cublas &lt = cublas();
  for (void *const layout : {plan->weight, plan->x, plan->out})
    if (layout != nullptr) lt.layout_destroy(layout);
  if (plan->product != nullptr) lt.product_destroy(plan->product);
  delete plan;
}

}  // extern "C"
