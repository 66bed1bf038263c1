// Runs the package of IdentityModel on random tensors, legal and illegal, by a seed, and prints how
// many were computed and how many refused; one that is computed wrongly ends it. Built with the
// sanitizers to look at what inputs can do.
//
//   run_each PACKAGE SEED COUNT
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <identity_conv/package.h>

#include <cstdlib>
#include <iostream>
#include <random>

namespace {

class Chance {
 public:
  explicit Chance(unsigned seed) : engine_(seed) {}

  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[engine_() % values.size()];
  }
  bool once_in(unsigned times) { return engine_() % times == 0; }

 private:
  std::mt19937 engine_;
};

at::Tensor random_tensor(Chance& chance) {
  if (chance.once_in(40)) return {};
  std::vector<int64_t> sizes = {2, 3, 8, 9};
  for (int64_t& size : sizes) {
    if (chance.once_in(3)) size = chance.one_of<int64_t>({0, 1, 2, 3, 5, 16, 64, 65, 513});
  }
  sizes.resize(chance.one_of<std::size_t>({4, 4, 4, 4, 4, 3, 0, 5}), 2);
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  if (count > (1 << 20)) sizes.front() = 1;
  if (chance.once_in(30)) return at::empty(sizes, at::device(at::kMeta));
  at::Tensor x = at::rand(sizes);
  if (x.dim() > 1) {
    if (chance.once_in(3)) x = x.transpose(0, -1);
    if (chance.once_in(4)) x = x.slice(-1, 0, std::nullopt, 2);
    if (chance.once_in(4)) x = x.slice(1, 1);
    if (chance.once_in(4)) x = x.narrow(0, 0, std::min<int64_t>(x.size(0), 1)).expand_as(x);
  }
  if (chance.once_in(8)) x = x._neg_view();
  if (chance.once_in(8))
    x = x.to(chance.one_of({at::kDouble, at::kLong, at::kBFloat16, at::kBool}));
  if (chance.once_in(20)) x = at::complex(x.to(at::kFloat), x.to(at::kFloat)).conj();
  if (chance.once_in(20)) x = x.to_sparse();
  if (x.layout() == at::kStrided && chance.once_in(20) && x.is_floating_point()) {
    x = x.detach().requires_grad_();
  }
  if (x.layout() == at::kStrided && chance.once_in(30)) {
    x = x.clone();
    x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_nbytes(0);
  }
  return x;
}

}  // namespace

int main(int, char** arguments) {
  identity_conv::Package package = identity_conv::Package::open(arguments[1]);
  Chance chance(static_cast<unsigned>(std::atoi(arguments[2])));
  const int count = std::atoi(arguments[3]);
  int computed = 0;
  for (int i = 0; i < count; ++i) {
    const std::vector<at::Tensor> inputs(
        chance.once_in(30) ? chance.one_of<std::size_t>({0, 2}) : 1, random_tensor(chance));
    try {
      const at::Tensor y = package.run(inputs).at(0);
      if (y.sizes() != inputs[0].sizes() || !at::allclose(y, inputs[0].detach(), 1e-5, 1e-5)) {
        std::cout << "wrong in case " << i << std::endl;
        return 1;
      }
      ++computed;
    } catch (const identity_conv::PackageError&) {
    }
  }
  std::cout << computed << " computed, " << count - computed << " refused" << std::endl;
}
