// CUDA's runtime without a GPU: what torch calls of libcudart, on the memory of the host.
//
// A stream is a queue of operations. They run as late as CUDA allows, which is when the host waits
// for their stream or for an event behind them. This reveals results that are read too early, and
// memory that is written while a queued operation has yet to read it. Calls that CUDA forbids
// during a capture fail. New memory is filled with NaN, and freed memory is unmapped.
//
// Neither kernels nor copies run. simulated_gpu.py enqueues calls of Python in their place.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

struct Event;
struct Graph;

struct Operation {
    enum Kind { CALL, RECORD, WAIT, REPLAY } kind;
    long number = 0;  // which call, or which record of the event
    Event* event = nullptr;
    Graph* graph = nullptr;
};

struct Graph {
    std::vector<Operation> operations;
};

struct Capture {
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    unsigned long id;
    Graph* graph = new Graph;
    bool is_valid = true;
};

struct Stream {
    std::deque<Operation> queue;
    Capture* capture = nullptr;
};

struct Event {
    long num_recorded = 0;
    long num_done = 0;
    Stream* stream = nullptr;
    Capture* capture = nullptr;  // in which it was recorded last
};

using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex state;    // guards all of the following
std::recursive_mutex running;  // held by the thread that runs operations
Stream default_stream;
std::set<Stream*> streams{&default_stream};
std::set<Capture*> captures;
std::map<char*, size_t> device_memory, pinned_memory;
constexpr size_t TOTAL = size_t(3) << 30;
size_t used = 0;
unsigned long num_captures = 0;
void (*call_python)(long) = nullptr;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t fail(cudaError_t error) {
    last_error = error;
    return error;
}

template <class T>
cudaError_t give(T* target, T value) {
    *target = value;
    return cudaSuccess;
}

Stream& find(cudaStream_t stream) {
    bool is_default = stream == nullptr || stream == cudaStreamLegacy;
    return is_default ? default_stream : *reinterpret_cast<Stream*>(stream);
}

// Return whether a call is forbidden now because of a capture, which then fails.
bool is_forbidden() {
    Lock lock(state);
    if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
    for (Capture* capture : captures) {
        bool is_own = capture->thread == std::this_thread::get_id();
        bool is_global = capture->mode == cudaStreamCaptureModeGlobal;
        if (is_own || (is_global && thread_mode == cudaStreamCaptureModeGlobal)) {
            capture->is_valid = false;
            return true;
        }
    }
    return false;
}

void run(const Operation& operation);

// Run operations of a stream until an event has been recorded `number` times, or all.
void run_until(Stream& stream, const Event* event = nullptr, long number = 0) {
    Lock only_one(running);
    while (true) {
        Operation operation;
        {
            Lock lock(state);
            bool is_reached = event != nullptr && event->num_done >= number;
            if (is_reached || stream.queue.empty()) return;
            operation = stream.queue.front();
            stream.queue.pop_front();
        }
        run(operation);
    }
}

void run(const Operation& operation) {
    switch (operation.kind) {
        case Operation::CALL:
            call_python(operation.number);
            break;
        case Operation::RECORD: {
            Lock lock(state);
            operation.event->num_done = std::max(operation.event->num_done, operation.number);
            break;
        }
        case Operation::WAIT:
            run_until(*operation.event->stream, operation.event, operation.number);
            break;
        case Operation::REPLAY:
            for (const Operation& each : operation.graph->operations) run(each);
            break;
    }
}

void run_all() {
    std::set<Stream*> all;
    {
        Lock lock(state);
        all = streams;
    }
    for (Stream* stream : all) run_until(*stream);
}

cudaError_t enqueue(cudaStream_t stream, const Operation& operation) {
    Lock lock(state);
    Capture* capture = find(stream).capture;
    if (capture == nullptr) {
        find(stream).queue.push_back(operation);
    } else if (capture->is_valid) {
        capture->graph->operations.push_back(operation);
    } else {
        return fail(cudaErrorStreamCaptureInvalidated);
    }
    return cudaSuccess;
}

bool contains(const std::map<char*, size_t>& memory, const void* address) {
    Lock lock(state);
    auto after = memory.upper_bound((char*)address);
    if (after == memory.begin()) return false;
    auto [start, size] = *--after;
    return address < start + size;
}

}  // namespace

extern "C" {

void simulate(void (*call)(long)) { call_python = call; }
int simulate_call(cudaStream_t stream, long number) {
    Operation operation{Operation::CALL};
    operation.number = number;
    return enqueue(stream, operation);
}

// The device

cudaError_t cudaGetDeviceCount(int* count) { return give(count, 1); }
cudaError_t cudaGetDevice(int* device) { return give(device, 0); }
cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
cudaError_t cudaDriverGetVersion(int* version) { return give(version, 13000); }
cudaError_t cudaRuntimeGetVersion(int* version) { return give(version, 13000); }
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t) { return "a simulated error"; }
const char* cudaGetErrorString(cudaError_t error) {
    thread_local char text[64];
    snprintf(text, sizeof text, "simulated CUDA error %d", int(error));
    return text;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    strcpy(properties->name, "simulated GPU");
    properties->totalGlobalMem = TOTAL;
    properties->major = 9;
    properties->multiProcessorCount = 8;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return give(value, 0); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    return give(greatest, 0);
}
cudaError_t cudaDeviceSynchronize() {
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    run_all();
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}
size_t cudnnGetVersion() { return 91900; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
    *flags = 0;
    return give(is_active, 1);
}

// Memory

cudaError_t cudaMalloc(void** address, size_t size) {
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    Lock lock(state);
    if (used + size > TOTAL) return fail(cudaErrorMemoryAllocation);
    *address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(*address, 0xFF, size);
    device_memory[(char*)*address] = size;
    used += size;
    return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
    if (address == nullptr) return cudaSuccess;
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    run_all();
    Lock lock(state);
    size_t size = device_memory.at((char*)address);
    device_memory.erase((char*)address);
    used -= size;
    munmap(address, size);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = TOTAL;
    return give(free, TOTAL - used);
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    *address = malloc(size);
    Lock lock(state);
    pinned_memory[(char*)*address] = size;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    Lock lock(state);
    pinned_memory.erase((char*)address);
    free(address);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    if (contains(device_memory, address)) attributes->type = cudaMemoryTypeDevice;
    if (contains(pinned_memory, address)) attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = (void*)address;
    return cudaSuccess;
}

// Streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    Lock lock(state);
    *stream = (cudaStream_t)*streams.insert(new Stream).first;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return give(priority, 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Capture* capture = find(stream).capture;
    if (capture != nullptr) capture->is_valid = false;
    if (capture != nullptr || is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    run_until(find(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Lock lock(state);
    return find(stream).queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = (cudaEvent_t) new Event;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // may be in a queue
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    Lock lock(state);
    Event* event = (Event*)handle;
    event->capture = find(stream).capture;
    if (event->capture != nullptr) return cudaSuccess;
    event->stream = &find(stream);
    Operation operation{Operation::RECORD};
    operation.event = event;
    operation.number = ++event->num_recorded;
    return enqueue(stream, operation);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
    Lock lock(state);
    Event* event = (Event*)handle;
    Capture* capture = find(stream).capture;
    if (event->capture != capture) return fail(cudaErrorStreamCaptureIsolation);
    if (capture != nullptr || event->num_recorded == 0) return cudaSuccess;
    Operation operation{Operation::WAIT};
    operation.event = event;
    operation.number = event->num_recorded;
    return enqueue(stream, operation);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    Lock lock(state);
    Event* event = (Event*)handle;
    return event->num_done >= event->num_recorded ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    if (is_forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
    Event* event = (Event*)handle;
    if (event->stream != nullptr) run_until(*event->stream, event, event->num_recorded);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return give(ms, 1.0f); }

// Graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Lock lock(state);
    if (&find(stream) == &default_stream) return fail(cudaErrorStreamCaptureUnsupported);
    if (find(stream).capture != nullptr) return fail(cudaErrorIllegalState);
    find(stream).capture = new Capture{mode, std::this_thread::get_id(), ++num_captures};
    captures.insert(find(stream).capture);
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    Lock lock(state);
    Capture* capture = find(stream).capture;
    if (capture == nullptr) return fail(cudaErrorIllegalState);
    find(stream).capture = nullptr;
    captures.erase(capture);
    *graph = capture->is_valid ? (cudaGraph_t)capture->graph : nullptr;
    return capture->is_valid ? cudaSuccess : fail(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    Lock lock(state);
    Capture* capture = find(stream).capture;
    *status = cudaStreamCaptureStatusNone;
    if (capture != nullptr) {
        *status = capture->is_valid ? cudaStreamCaptureStatusActive
                                    : cudaStreamCaptureStatusInvalidated;
    }
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    Lock lock(state);
    Capture* capture = find(stream).capture;
    if (capture != nullptr && id != nullptr) *id = capture->id;
    if (capture != nullptr && graph != nullptr) *graph = (cudaGraph_t)capture->graph;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    Operation operation{Operation::REPLAY};
    operation.graph = (Graph*)executable;
    return enqueue(stream, operation);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }  // may be in a queue
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    return give(count, ((Graph*)graph)->operations.size());
}

// Kernels of torch, which must not run: each operator has a call of Python in its place.

void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(
    void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
    return fail(cudaErrorNotSupported);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
    return fail(cudaErrorNotSupported);
}
}
