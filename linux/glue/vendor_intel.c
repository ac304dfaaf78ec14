// SPDX-License-Identifier: GPL-2.0-only
/* kvm-intel.ko: see vendor.c. */
#define GNT_INTEL
#include "vendor.c"
