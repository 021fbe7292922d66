// Stands in for the driver's libnvidia-ml.so.1, for tests: answers as the file that NVML_STUB names says.
//
// Each line of it is a name and a value: a figure ("sm_mhz 1410"), or
//   returns FUNCTION CODE   that function fails so
//   takes FUNCTION MS       that function takes so long
//   lost_after N            from the Nth look at the utilisation on, the device is lost
//   process PID PERCENT     a process on the device, and how much it computes; PID may be "self"
// The structures are those of pynvml, which calls it.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, IS_LOST = 15 };

struct Process { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; };
struct Sample { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; };

struct Told {
    std::map<std::string, double> figures;
    std::map<std::string, int> codes, ms;
    std::vector<std::pair<unsigned, unsigned>> processes;
    std::string uuid;
};

int looks = 0, initialised = 0;
unsigned long long sampled_us = 1000;

Told told() {
    Told all;
    const char* path = getenv("NVML_STUB");
    FILE* file = path ? fopen(path, "r") : nullptr;
    if (!file) return all;
    char name[128], first[128];
    while (fscanf(file, "%127s %127s", name, first) == 2) {
        int second = 0;
        if (!strcmp(name, "returns") || !strcmp(name, "takes") || !strcmp(name, "process"))
            if (fscanf(file, "%d", &second) != 1) break;
        if (!strcmp(name, "returns")) all.codes[first] = second;
        else if (!strcmp(name, "takes")) all.ms[first] = second;
        else if (!strcmp(name, "process"))
            all.processes.push_back({!strcmp(first, "self") ? getpid() : atoi(first), second});
        else if (!strcmp(name, "uuid")) all.uuid = first;
        else all.figures[name] = atof(first);
    }
    fclose(file);
    return all;
}

// What every function does first: waits, and returns what it fails with.
int enter(const Told& all, const char* function) {
    auto ms = all.ms.find(function);
    if (ms != all.ms.end()) usleep(1000 * ms->second);
    auto code = all.codes.find(function);
    if (code != all.codes.end()) return code->second;
    auto last = all.figures.find("lost_after");
    return last != all.figures.end() && looks >= last->second ? IS_LOST : SUCCESS;
}

int number(const char* function, const char* figure, unsigned* value) {
    Told all = told();
    int code = enter(all, function);
    if (code) return code;
    auto found = all.figures.find(figure);
    if (found == all.figures.end()) return NOT_SUPPORTED;
    *value = (unsigned)found->second;
    return SUCCESS;
}

int device(const char* function, bool known, void** handle) {
    int code = enter(told(), function);
    if (code) return code;
    if (!known) return NOT_FOUND;
    *handle = &looks;
    return SUCCESS;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) {
    looks = 0;
    initialised++;
    return enter(told(), "nvmlInitWithFlags");
}
int nvmlShutdown() { return --initialised < 0 ? 1 : SUCCESS; }
int nvmlStubInitialised() { return initialised; }

int nvmlDeviceGetCount_v2(unsigned* count) { return number("nvmlDeviceGetCount_v2", "count", count); }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
    return device("nvmlDeviceGetHandleByUUID", told().uuid == uuid, handle);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** handle) {
    return device("nvmlDeviceGetHandleByPciBusId_v2", !strcmp(address, "00000000:65:00.0"), handle);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** handle) {
    return device("nvmlDeviceGetHandleByIndex_v2", true, handle);
}
int nvmlDeviceGetMigMode(void*, unsigned* now, unsigned* later) {
    *later = 0;
    return number("nvmlDeviceGetMigMode", "mig", now);
}

int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
    looks++;
    rates[1] = 0;
    return number("nvmlDeviceGetUtilizationRates", "busy_percent", rates);
}

#define NUMBER(function, figure) \
    int function(void*, unsigned* value) { return number(#function, figure, value); }
NUMBER(nvmlDeviceGetPowerUsage, "power_mw")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "default_power_limit_mw")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "max_pcie_generation")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "max_pcie_width")
NUMBER(nvmlDeviceGetNumGpuCores, "num_cores")
NUMBER(nvmlDeviceGetMemoryBusWidth, "memory_bus_bits")

int nvmlDeviceGetClockInfo(void*, unsigned, unsigned* mhz) {
    return number("nvmlDeviceGetClockInfo", "sm_mhz", mhz);
}
int nvmlDeviceGetMaxClockInfo(void*, unsigned clock, unsigned* mhz) {
    return number("nvmlDeviceGetMaxClockInfo", clock == 1 ? "max_sm_mhz" : "max_memory_mhz", mhz);
}
int nvmlDeviceGetTemperature(void*, unsigned, unsigned* celsius) {
    return number("nvmlDeviceGetTemperature", "temperature_c", celsius);
}
int nvmlDeviceGetPcieThroughput(void*, unsigned direction, unsigned* kib_per_s) {
    const char* figure = direction == 1 ? "received_kib_per_s" : "sent_kib_per_s";
    return number("nvmlDeviceGetPcieThroughput", figure, kib_per_s);
}

static int wide(const char* function, const char* figure, unsigned long long* value) {
    unsigned low = 0;
    int code = number(function, figure, &low);
    *value = low;
    return code;
}
int nvmlDeviceGetTotalEccErrors(void*, unsigned, unsigned, unsigned long long* errors) {
    return wide("nvmlDeviceGetTotalEccErrors", "uncorrected_errors", errors);
}
int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* bits) {
    return wide("nvmlDeviceGetCurrentClocksEventReasons", "reasons", bits);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* bits) {
    return wide("nvmlDeviceGetCurrentClocksThrottleReasons", "reasons", bits);
}

static int processes(const char* function, unsigned* count, Process* out) {
    Told all = told();
    int code = enter(all, function);
    if (code) return code;
    unsigned room = *count;
    *count = all.processes.size();
    if (all.processes.empty()) return SUCCESS;
    if (room < all.processes.size()) return INSUFFICIENT_SIZE;
    for (size_t i = 0; i < all.processes.size(); i++) out[i] = {all.processes[i].first, 1 << 20, 0, 0};
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, Process* out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v3", count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void*, unsigned* count, Process* out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v2", count, out);
}
int nvmlDeviceGetProcessUtilization(void*, Sample* out, unsigned* count, unsigned long long since_us) {
    Told all = told();
    int code = enter(all, "nvmlDeviceGetProcessUtilization");
    if (code) return code;
    if (since_us > sampled_us) return NOT_FOUND;
    unsigned room = *count;
    *count = all.processes.size();
    if (room < all.processes.size()) return INSUFFICIENT_SIZE;
    sampled_us++;
    for (size_t i = 0; i < all.processes.size(); i++)
        out[i] = {all.processes[i].first, sampled_us, all.processes[i].second, 0, 0, 0};
    return SUCCESS;
}

}  // extern "C"
