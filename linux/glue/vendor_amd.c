// SPDX-License-Identifier: GPL-2.0-only
/* kvm-amd.ko: see vendor.c. */
#define GNT_AMD
#include "vendor.c"
