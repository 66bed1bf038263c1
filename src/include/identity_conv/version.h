// IDENTITY_CONV_VERSION, the version of this package as text: identity_conv.__version__ in Python.

#pragma once

#define IDENTITY_CONV_VERSION "0.1.0"
