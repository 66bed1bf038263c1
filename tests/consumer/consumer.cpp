// A project of one's own: opens a package, verifies it, and runs it on ones.
#include <ATen/ops/ones.h>
#include <identity_conv/package.h>

#include <iostream>

int main(int, char** arguments) try {
  identity_conv::Package package = identity_conv::Package::open(arguments[1]);
  std::cout << package.verify() << '\n' << package.run({at::ones({2, 3, 8, 9})})[0].sum() << '\n';
} catch (const identity_conv::PackageError& error) {
  std::cout << error.what() << '\n';
  return 1;
}
