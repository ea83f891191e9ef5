/* What Triton calls of CUDA's driver, for one device that is not there: memory is the CPU's, and a launch goes to the
 * function that was set. All that is asked for succeeds. */
#include <stddef.h>
#include <stdint.h>

typedef int result; /* CUresult, of which 0 is success */
typedef struct { unsigned grid_x; } launch_config; /* how a CUlaunchConfig begins */
typedef void (*launched)(void *function, unsigned programs, void **arguments);

enum { MAX_THREADS_PER_BLOCK = 0 }; /* of a function */
enum { WARP_SIZE = 10, MAX_REGISTERS_PER_BLOCK = 12, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97 }; /* of a device */

static launched on_launch;
static uintptr_t functions;

void stand_in_on_launch(launched function) { on_launch = function; }

result cuGetErrorString(result error, const char **text) { return (void)error, *text = "none", 0; }
result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
result cuDeviceGet(int *device, int index) { return *device = index, 0; }
result cuDeviceGetAttribute(int *value, int which, int device)
{
    (void)device;
    *value = which == WARP_SIZE ? 32 : which == MAX_REGISTERS_PER_BLOCK ? 65536
             : which == MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 132;
    return 0;
}
result cuDevicePrimaryCtxRetain(void **context, int device) { return (void)device, *context = &functions, 0; }
result cuCtxGetCurrent(void **context) { return *context = &functions, 0; }
result cuCtxSetCurrent(void *context) { return (void)context, 0; }
result cuCtxGetLimit(size_t *value, int which) { return (void)which, *value = 0, 0; }
result cuCtxSetLimit(int which, size_t value) { return (void)which, (void)value, 0; }
result cuModuleLoadData(void **module, const void *data) { return (void)data, *module = &functions, 0; }
result cuModuleGetFunction(void **function, void *module, const char *name)
{
    return (void)module, (void)name, *function = (void *)++functions, 0;
}
result cuFuncGetAttribute(int *value, int which, void *function)
{
    return (void)function, *value = which == MAX_THREADS_PER_BLOCK ? 1024 : 0, 0;
}
result cuFuncSetAttribute(void *function, int which, int value) { return (void)function, (void)which, (void)value, 0; }
result cuFuncSetCacheConfig(void *function, int config) { return (void)function, (void)config, 0; }
result cuPointerGetAttribute(void *value, int which, uint64_t pointer)
{
    return (void)which, *(uint64_t *)value = pointer, 0;
}
result cuLaunchKernelEx(const launch_config *config, void *function, void **arguments, void **extra)
{
    (void)extra;
    if (on_launch) on_launch(function, config->grid_x, arguments);
    return 0;
}
