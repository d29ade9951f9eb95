// The C++ side of the agreement on params.h; cuda/params_check.cu is the other.
#include "kernels/params_check.h"
