// Opens and verifies each package named on the command line, in one process, and prints what came
// of it: "right", or the error's sentence. Built with the sanitizers to look at damaged files.
#include <identity_conv/package.h>

#include <iostream>

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    try {
      identity_conv::Package::open(argv[i]).verify();
      std::cout << "right" << std::endl;
    } catch (const identity_conv::PackageError& error) {
      std::cout << error.what() << std::endl;
    }
  }
}
