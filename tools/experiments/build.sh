# build.sh NAME [-D...]: from $FFI (default ffi)
S=$SITE_PACKAGES; N=$1; shift
nvcc -std=c++17 -O3 --expt-relaxed-constexpr --expt-extended-lambda -gencode=arch=compute_90a,code=sm_90a -Xptxas=-v,-warn-spills -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DJGG_SM90 -DJGG_WITH_CUDA -I ${FFI:-ffi} -isystem $S/cutlass_library/source/include "$@" -o bin/$N ${SRC:-wg.cu} ${FFI:-ffi}/common/tensor_map.cc > logs/$N.log 2>&1; echo $N rc $?
grep -E "error|C75|spill" logs/$N.log | grep -v " 0 bytes spill stores, 0 bytes" | head; grep -A1 "GemmSm90Kernel" logs/$N.log | grep -E "Used" | head -3
