// Which memory UCX moves here: puts and gets between host and device memory of two processes, per set of transports.
//
//   memory [TRANSPORTS...]    one line a case, of these values of UCX_TLS. `alone` says that the data was there although
//                             the target never made progress.
//   memory attributes         what the device says of itself, and rates of copies.
//
// The target checks the bytes after the initiator's flush. Every case has a deadline, and its own two processes, since
// CUDA does not survive a fork.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>
#include <vector>

static const size_t BYTES = 1 << 20;
static const char *ROLE = "";

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

static void fail(const std::string &what) {
    printf("%s: %s; ", ROLE, what.c_str());
    fflush(stdout);
    _exit(3);
}
#define UCX(call)                                                                                                                          \
    do {                                                                                                                                   \
        const ucs_status_t status = (call);                                                                                                \
        if (status != UCS_OK) fail(std::string(#call).substr(0, 40) + ": " + ucs_status_string(status));                                   \
    } while (0)
#define CUDA(call)                                                                                                                         \
    do {                                                                                                                                   \
        const cudaError_t error = (call);                                                                                                  \
        if (error != cudaSuccess) fail(std::string(#call).substr(0, 40) + ": " + cudaGetErrorString(error));                               \
    } while (0)

static void put(int to, const void *bytes, size_t length) {
    if (write(to, &length, sizeof length) != ssize_t(sizeof length) || write(to, bytes, length) != ssize_t(length)) fail("the other process is gone");
}
static std::vector<char> take(int from) {
    size_t length = 0;
    if (recv(from, &length, sizeof length, MSG_WAITALL) != ssize_t(sizeof length)) fail("the other process is gone");
    std::vector<char> bytes(length);
    if (recv(from, bytes.data(), length, MSG_WAITALL) != ssize_t(length)) fail("the other process is gone");
    return bytes;
}

struct Memory {
    void *at = nullptr;
    bool device = false;
    explicit Memory(bool on_device, unsigned char byte) : device(on_device) {
        if (device) {
            CUDA(cudaMalloc(&at, BYTES));
            CUDA(cudaMemset(at, byte, BYTES));
            CUDA(cudaDeviceSynchronize());
        } else {
            at = aligned_alloc(4096, BYTES);
            memset(at, byte, BYTES);
        }
    }
    size_t holding(unsigned char byte) const {
        std::vector<unsigned char> copy(BYTES);
        if (device) {
            CUDA(cudaMemcpy(copy.data(), at, BYTES, cudaMemcpyDeviceToHost));
        } else {
            memcpy(copy.data(), at, BYTES);
        }
        size_t count = 0;
        for (unsigned char b : copy) count += b == byte;
        return count;
    }
};

struct Process {
    ucp_context_h context;
    ucp_worker_h worker;
    Process() {
        CUDA(cudaSetDevice(0));
        CUDA(cudaFree(nullptr));
        ucp_config_t *config;
        UCX(ucp_config_read(nullptr, nullptr, &config));
        ucp_params_t params{};
        params.field_mask = UCP_PARAM_FIELD_FEATURES;
        params.features = UCP_FEATURE_RMA;
        UCX(ucp_init(&params, config, &context));
        ucp_config_release(config);
        ucp_worker_params_t of_worker{};
        of_worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        of_worker.thread_mode = UCS_THREAD_MODE_SINGLE;
        UCX(ucp_worker_create(context, &of_worker, &worker));
    }
    ucp_mem_h mapped(const Memory &memory) {
        ucp_mem_map_params_t params{};
        params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.address = memory.at;
        params.length = BYTES;
        params.memory_type = memory.device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
        ucp_mem_h handle;
        UCX(ucp_mem_map(context, &params, &handle));
        return handle;
    }
    void progress_until_word(int channel) {
        char byte;
        for (const double end = now() + 6; now() < end && recv(channel, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 1;) {
            for (int i = 0; i < 64; i++) ucp_worker_progress(worker);
        }
        (void)take(channel);
    }
    // Waits for an operation; false after `seconds`.
    bool done(ucs_status_ptr_t request, double seconds) {
        if (request == nullptr) return true;
        if (UCS_PTR_IS_ERR(request)) fail(ucs_status_string(UCS_PTR_STATUS(request)));
        for (const double end = now() + seconds; now() < end;) {
            for (int i = 0; i < 50; i++) ucp_worker_progress(worker);
            const ucs_status_t status = ucp_request_check_status(request);
            if (status == UCS_OK) return true;
            if (status != UCS_INPROGRESS) fail(ucs_status_string(status));
        }
        return false;
    }
};

static int target(int channel, bool device, bool get) {
    ROLE = "target";
    Process process;
    Memory memory(device, get ? 0x5a : 0x11);
    ucp_mem_h handle = process.mapped(memory);
    void *key;
    size_t key_bytes;
    UCX(ucp_rkey_pack(process.context, handle, &key, &key_bytes));
    ucp_address_t *address;
    size_t address_bytes;
    UCX(ucp_worker_get_address(process.worker, &address, &address_bytes));
    put(channel, address, address_bytes);
    put(channel, key, key_bytes);
    put(channel, &memory.at, sizeof memory.at);
    // With progress until the two are connected, then without; then, if the initiator asks, with it again.
    process.progress_until_word(channel);
    put(channel, "still", 6);
    const std::string first(take(channel).data());
    size_t alone = get ? 0 : memory.holding(0x5a);
    if (first != "done") process.progress_until_word(channel);
    if (!get) printf("target holds %zu of %zu bytes%s; ", memory.holding(0x5a), BYTES, alone == BYTES ? ", alone" : first == "done" ? ", LATE" : "");
    fflush(stdout);
    (void)take(channel); // the initiator has ended its further operations
    put(channel, "bye", 4);
    _exit(0);
}

static int initiator(int channel, bool device, bool get) {
    ROLE = "initiator";
    Process process;
    Memory memory(device, get ? 0x11 : 0x5a);
    ucp_mem_h handle = process.mapped(memory);
    const auto address = take(channel), key = take(channel), at = take(channel);
    void *remote;
    memcpy(&remote, at.data(), sizeof remote);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t *>(address.data());
    params.err_mode = getenv("PEER_ERRORS") ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    ucp_ep_h endpoint;
    UCX(ucp_ep_create(process.worker, &params, &endpoint));
    ucp_rkey_h remote_key;
    UCX(ucp_ep_rkey_unpack(endpoint, key.data(), &remote_key));
    ucp_request_param_t with{};
    with.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    with.memh = handle;
    with.memory_type = memory.device ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
    const uint64_t where = reinterpret_cast<uint64_t>(remote);
    const auto posted = [&](size_t bytes) {
        return get ? ucp_get_nbx(endpoint, memory.at, bytes, where, remote_key, &with) : ucp_put_nbx(endpoint, memory.at, bytes, where, remote_key, &with);
    };
    ucp_request_param_t none{};
    if (!process.done(posted(64), 5) || !process.done(ucp_ep_flush_nbx(endpoint, &none), 5)) fail("not connected after 5 s");
    put(channel, "connected", 10);
    (void)take(channel); // the target has stopped its progress
    const auto request = posted(BYTES);
    const auto flushed = ucp_ep_flush_nbx(endpoint, &none);
    const bool alone = process.done(request, 2) && process.done(flushed, 2);
    if (!alone) {
        put(channel, "progress", 9);
        if (!process.done(request, 5) || !process.done(flushed, 5)) fail("neither complete after 5 s of progress at both ends");
    }
    put(channel, "done", 5);
    printf("complete %s the target's progress; ", alone ? "without" : "with");
    if (alone) {
        const double start = now();
        for (int i = 0; i < 64; i++) {
            if (!process.done(posted(BYTES), 5)) fail("one of many is not complete");
        }
        if (!process.done(ucp_ep_flush_nbx(endpoint, &none), 5)) fail("the flush of many is not complete");
        printf("%.2f GB/s; ", 64.0 * BYTES / (now() - start) / 1e9);
    }
    if (get) printf("reader holds %zu of %zu bytes; ", memory.holding(0x5a), BYTES);
    fflush(stdout);
    put(channel, "end", 4);
    (void)take(channel);
    _exit(0);
}

static void one(const char *transports, bool from_device, bool to_device, bool get) {
    printf("UCX_TLS=%s %s, local %s, remote %s: ", transports, get ? "get" : "put", from_device ? "cuda" : "host", to_device ? "cuda" : "host");
    fflush(stdout);
    int channel[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, channel) != 0) exit(1);
    setenv("UCX_TLS", transports, 1);
    pid_t processes[2];
    for (int i = 0; i < 2; i++) {
        processes[i] = fork();
        if (processes[i] == 0) {
            close(channel[1 - i]);
            alarm(15);
            i == 0 ? target(channel[0], to_device, get) : initiator(channel[1], from_device, get);
        }
    }
    close(channel[0]);
    close(channel[1]);
    for (pid_t process : processes) {
        int status;
        waitpid(process, &status, 0);
        if (WIFSIGNALED(status)) printf("killed by signal %d; ", WTERMSIG(status));
    }
    printf("\n");
    fflush(stdout);
}

static void attributes() {
    CUDA(cudaSetDevice(0));
    const std::pair<const char *, CUdevice_attribute> all[] = {
        {"GPUDirect RDMA supported", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED},
        {"GPUDirect RDMA flush options", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS},
        {"GPUDirect RDMA writes ordering", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING},
        {"GPUDirect RDMA with VMM", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
        {"dma-buf", CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED},
        {"host registration", CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED},
        {"virtual memory management", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
        {"stream memory operations", CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS},
        {"copy engines", CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
        {"shared memory of a block, opt-in", CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN},
        {"second-level cache", CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE},
    };
    int driver = 0;
    cudaDriverGetVersion(&driver);
    printf("driver API %d\n", driver);
    for (const auto &[name, attribute] : all) {
        int value = -1;
        cudaDeviceGetAttribute(&value, cudaDeviceAttr(attribute), 0);
        printf("%s: %d\n", name, value);
    }
    char bus[32];
    cudaDeviceGetPCIBusId(bus, sizeof bus, 0);
    printf("bus %s\n", bus);
    // Copy rates: pinned and pageable host memory, and within the device.
    const size_t bytes = 1ul << 30;
    void *device, *second, *pinned;
    CUDA(cudaMalloc(&device, bytes));
    CUDA(cudaMalloc(&second, bytes));
    CUDA(cudaMallocHost(&pinned, bytes));
    void *pageable = malloc(bytes);
    memset(pageable, 1, bytes);
    const auto rate = [&](const char *name, void *to, void *from, double per_byte, size_t size) {
        cudaEvent_t start, end;
        cudaEventCreate(&start);
        cudaEventCreate(&end);
        float best = 1e9f;
        for (int i = 0; i < 6; i++) {
            cudaEventRecord(start);
            cudaMemcpyAsync(to, from, size, cudaMemcpyDefault);
            cudaEventRecord(end);
            cudaEventSynchronize(end);
            float milliseconds;
            cudaEventElapsedTime(&milliseconds, start, end);
            if (milliseconds < best) best = milliseconds;
        }
        printf("%s, %zu bytes: %.1f GB/s, %.1f us\n", name, size, per_byte * double(size) / best / 1e6, best * 1e3);
    };
    rate("copy within the device (read and written)", device, second, 2, bytes);
    for (size_t size : {size_t(4) << 10, size_t(64) << 10, size_t(1) << 20, bytes}) {
        rate("pinned host to device", device, pinned, 1, size);
        rate("device to pinned host", pinned, device, 1, size);
    }
    rate("pageable host to device", device, pageable, 1, bytes);
    rate("device to pageable host", pageable, device, 1, bytes);
}

int main(int count, char **arguments) {
    if (count > 1 && strcmp(arguments[1], "attributes") == 0) {
        attributes();
        return 0;
    }
    std::vector<const char *> sets(arguments + 1, arguments + count);
    if (sets.empty()) {
        sets = {"tcp", "tcp,cuda_copy", "posix,sysv", "posix,sysv,cuda_copy", "posix,sysv,cuda_copy,cuda_ipc", "cma,posix,sysv", "cma,posix,sysv,cuda_copy", "cuda_ipc,cuda_copy,tcp", "all"};
    }
    for (const char *transports : sets) {
        for (bool get : {false, true}) {
            one(transports, false, false, get);
            one(transports, false, true, get);
            one(transports, true, false, get);
            one(transports, true, true, get);
        }
    }
    return 0;
}
