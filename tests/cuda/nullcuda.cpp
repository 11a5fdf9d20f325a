// A CUDA device without memory and streams: what PyTorch's CPU build asks of a device when autograd
// meets fake tensors on "cuda". `fake_cuda.py` compiles it and calls install() before the first
// backward pass of a process, as the engine makes its threads, one for each device, only once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>
namespace {
using namespace c10;
constexpr auto CUDA = DeviceType::CUDA;
struct Hooks : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  bool isPinnedPtr(const void*) const override { return false; }
};
struct Guard final : impl::NoOpDeviceGuardImpl<CUDA> {
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Device getDevice() const override { return Device(CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getNewStream(Device d, int = 0) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
Guard guard;
}
extern "C" void install() {
  impl::device_guard_impl_registry[static_cast<int>(CUDA)].store(&guard);
  // The hooks that are there hold no state: only their table of functions is replaced.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
