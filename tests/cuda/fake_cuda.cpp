// What PyTorch asks of CUDA before it runs an operation, answered by nobody's device. Fake tensors need no more.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

constexpr DeviceIndex DEVICES = 2;
static thread_local DeviceIndex current = 0;

struct FakeGuard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
    static Device device(DeviceIndex index) { return Device(DeviceType::CUDA, index < 0 ? current : index); }
    DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    Device getDevice() const override { return device(current); }
    void setDevice(Device other) const override { current = other.index(); }
    void uncheckedSetDevice(Device other) const noexcept override { current = other.index(); }
    Device exchangeDevice(Device other) const override {
        const Device before = getDevice();
        setDevice(other);
        return before;
    }
    Stream getStream(Device on) const noexcept override { return Stream(Stream::DEFAULT, device(on.index())); }
    Stream getDefaultStream(Device on) const override { return getStream(on); }
    Stream getNewStream(Device on, int) const override {
        static StreamId made = 0;
        return Stream(Stream::UNSAFE, device(on.index()), ++made);
    }
    Stream exchangeStream(Stream other) const noexcept override { return getStream(other.device()); }
    void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}
    void synchronizeStream(const Stream&) const override {}
    void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

struct FakeHooks final : at::CUDAHooksInterface {
    explicit FakeHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    int getNumGPUs() const override { return DEVICES; }
    DeviceIndex deviceCount() const override { return DEVICES; }
    DeviceIndex current_device() const override { return current; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex index) const override { current = index; }
    Allocator* getPinnedMemoryAllocator() const override { return GetAllocator(DeviceType::CPU); }
};
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, FakeHooks)
}
