// A driver library with one card, for the real cuda.bindings to load: attributes answer with their own number, a few with
// what makes sense, and FAKE_CUDA_INIT is what cuInit answers.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

extern "C" {

int cuInit(unsigned) {
    const char* answer = getenv("FAKE_CUDA_INIT");
    return answer ? atoi(answer) : 0;
}

int cuGetErrorName(int status, const char** text) {
    *text = status == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "CUDA_ERROR_OF_TOMORROW";
    return 0;
}

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}

int cuDeviceGet(int* device, int index) {
    *device = index;
    return 0;
}

int cuDeviceGetName(char* name, int length, int) {
    strncpy(name, "Played Card", length);
    return 0;
}

int cuDeviceTotalMem_v2(size_t* size, int) {
    *size = size_t(8) << 30;
    return 0;
}

int cuDeviceGetUuid_v2(char* uuid, int) {
    for (int i = 0; i < 16; i++) uuid[i] = char(i * 17);
    return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 13: return 1;               // clock rate: this call fails
        case 18: *value = 0; return 0;   // integrated
        case 20: *value = 0; return 0;   // compute mode
        case 33: *value = 1; return 0;   // PCI bus
        case 34: *value = 0; return 0;   // PCI device
        case 38: *value = 0; return 0;   // L2 size, not reported
        case 50: *value = 0; return 0;   // PCI domain
        case 75: *value = 9; return 0;   // capability
        case 76: *value = 0; return 0;
        default: *value = attribute; return 0;
    }
}

int cuGetProcAddress_v2(const char* symbol, void** function, int, unsigned long long, int* status) {
    char versioned[128];
    strncpy(versioned, symbol, sizeof versioned - 4);
    versioned[sizeof versioned - 4] = 0;
    strcat(versioned, "_v2");
    void* self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    *function = dlsym(self, versioned);
    if (!*function) *function = dlsym(self, symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
}
