#include "regex.h"

IDENTITY_CONV_REGEX()
