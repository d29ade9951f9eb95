// The revision of the sources that this program was built from. The build writes its value.
#pragma once

namespace sluice::bench {

extern const char* const kRevision;

}  // namespace sluice::bench
